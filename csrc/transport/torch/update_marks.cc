#include "transport/torch/update_marks.h"

#include <ATen/CPUGeneratorImpl.h>

#include <exception>

namespace gradcast {

std::tuple<uint64_t, uint32_t, uint32_t, bool> random_position() {
  const at::Generator& generator = at::detail::getDefaultCPUGenerator();
  auto* own = at::check_generator<at::CPUGeneratorImpl>(generator);
  own->mutex_.lock();  // torch's, around what does not throw
  const at::mt19937_data_pod data = own->engine().data();
  // A normal distribution draws two numbers, and keeps one of them for the next time.
  const bool keeps_one = own->next_float_normal_sample().has_value() || own->next_double_normal_sample().has_value();
  own->mutex_.unlock();
  return {data.seed_, data.next_, data.state_[0], keeps_one};
}

std::optional<uint64_t> operations_begun(c10d::ProcessGroup& group) {
  uint64_t count = 0;
  try {
    for (const c10::Device& device : group.getDeviceTypes())
      count += group.getBackend(device.type())->getSequenceNumberForGroup();
  } catch (const std::exception&) {  // of torch, or of a backend of the program's own
    return std::nullopt;
  }
  return count;
}

}  // namespace gradcast
