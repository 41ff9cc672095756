// Whether a thread of this process waits for something, as the system knows it.
#pragma once

#include <unistd.h>

#include <fstream>
#include <iterator>
#include <string>

namespace gradcast {

// `id` is what gettid() says in that thread; of 0 and of one that has ended: false. A thread that has nothing else to
// sleep in than the call under test has entered it.
inline bool is_asleep(pid_t id) {
  std::ifstream file("/proc/self/task/" + std::to_string(id) + "/stat");
  const std::string text((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
  const size_t name_end = text.rfind(')');  // the state follows the name, proc(5)
  return name_end != std::string::npos && name_end + 2 < text.size() && text[name_end + 2] == 'S';
}

}  // namespace gradcast
