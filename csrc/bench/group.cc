#include "bench/group.h"

#include <algorithm>

#include "transport/common/host_memory.h"

namespace gradcast {

std::vector<std::vector<double>> Group::gather(const std::vector<double>& own) {
  std::vector<std::vector<double>> numbers;
  const std::string text(reinterpret_cast<const char*>(own.data()), own.size() * sizeof(double));
  for (const std::string& each : gather_texts(text)) {
    std::memcpy(numbers.emplace_back(each.size() / sizeof(double)).data(), each.data(), each.size());
  }
  return numbers;
}

double Group::pack_ns_per_byte() {
  constexpr int64_t kBytes = 4 << 20;
  std::vector<std::byte> numbers(kBytes);
  std::vector<std::byte> message(kBytes);
  const HostBuffer buffer{numbers.data(), kBytes, Element::kFloat32};
  const Range halves[] = {{0, kBytes / 2}, {kBytes / 2, kBytes}};
  std::vector<double> times_ns;
  for (int i = 0; i < 9; ++i) {
    const int64_t begin_ns = steady_now_ns();
    pack(message.data(), buffer, halves);
    unpack(buffer, halves, message.data());
    times_ns.push_back(static_cast<double>(steady_now_ns() - begin_ns));
  }
  std::ranges::sort(times_ns);
  return times_ns[times_ns.size() / 2] / kBytes;
}

}  // namespace gradcast
