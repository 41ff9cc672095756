#include "gradcast/profile.h"

#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include "gradcast/error.h"

namespace gradcast {
namespace {

[[noreturn]] void refuse(const std::string& message) {
  throw Error(ErrorCode::kInvalidProfile, message);
}

constexpr const char* kLongest = "the longest time accepted";

// `field()` names the time. It is called only where one is wrong: a profile of 100,000 tensors is checked before every
// plan.
template <typename Field>
void check_time(Field field, double time_ns, double max_ns, const char* max_name) {
  if (time_ns >= 0 && time_ns <= max_ns) {
    return;
  }
  const std::string is = field() + " is ";
  refuse(!std::isfinite(time_ns) ? is + "not a finite number; measure it again"
         : time_ns < 0           ? is + number_text(time_ns) + "; times start at 0"
                       : is + number_text(time_ns) + ", later than " + max_name + " (" + number_text(max_ns) + ")");
}

void check_tensor(const Profile& profile, size_t index) {
  const Tensor& tensor = profile.tensors[index];
  const auto field = [&](const char* name) { return "tensors[" + std::to_string(index) + "]." + name; };
  if (tensor.bytes < 1 || tensor.bytes > kBytesMax) {
    refuse(field("bytes") + " is " + std::to_string(tensor.bytes) +
           "; it must lie between 1 and 2^53 (a layer without parameters is not a tensor: omit it)");
  }
  if (tensor.element_bytes < 1 || tensor.bytes % tensor.element_bytes != 0) {
    refuse(field("element_bytes") + " is " + std::to_string(tensor.element_bytes) +
           "; it must be positive and divide the tensor's " + std::to_string(tensor.bytes) + " bytes");
  }
  if (tensor.buffer < 0 || tensor.buffer >= kBufferCountMax) {
    refuse(field("buffer") + " is " + std::to_string(tensor.buffer) + "; buffers are numbered from 0 to " +
           std::to_string(kBufferCountMax - 1) + ", one for each data type and device");
  }
  check_time([&] { return field("ready_ns"); }, tensor.ready_ns, profile.backward_ns, "the end of backward");
  check_time([&] { return field("need_ns"); }, tensor.need_ns, profile.forward_ns, "the end of forward");
  check_time([&] { return field("update_ns"); }, tensor.update_ns, kTimeMaxNs, kLongest);
  if (index > 0 && tensor.need_ns < profile.tensors[index - 1].need_ns) {
    refuse(field("need_ns") +
           " is earlier than that of the tensor before it; list the tensors in need order, the one "
           "that forward reads first at the top");
  }
}

bool more_urgent(const Tensor& a, const Tensor& b) {
  return a.need_ns != b.need_ns ? a.need_ns < b.need_ns : a.ready_ns > b.ready_ns;
}

}  // namespace

void check_profile(const Profile& profile) {
  if (profile.world_size < 1) {
    refuse("world_size is " + std::to_string(profile.world_size) + "; at least one worker trains");
  }
  check_time([] { return std::string("forward_ns"); }, profile.forward_ns, kTimeMaxNs, kLongest);
  check_time([] { return std::string("backward_ns"); }, profile.backward_ns, kTimeMaxNs, kLongest);
  check_time([] { return std::string("part_ns"); }, profile.part_ns, kTimeMaxNs, kLongest);
  check_time([] { return std::string("host_step_ns"); }, profile.host_step_ns, kTimeMaxNs, kLongest);
  check_time([] { return std::string("host_part_ns"); }, profile.host_part_ns, kTimeMaxNs, kLongest);
  check_time([] { return std::string("host_block_ns"); }, profile.host_block_ns, kTimeMaxNs, kLongest);
  if (profile.tensors.empty()) {
    refuse("tensors is empty; a profile has at least one tensor");
  }
  int64_t total_bytes = 0;
  std::vector<int32_t> element_bytes(kBufferCountMax, 0);
  for (size_t i = 0; i < profile.tensors.size(); ++i) {
    check_tensor(profile, i);
    const Tensor& tensor = profile.tensors[i];
    total_bytes += tensor.bytes;
    if (total_bytes > kBytesMax) {
      refuse("tensors carry more than 2^53 bytes in all");
    }
    int32_t& of_buffer = element_bytes[tensor.buffer];
    if (of_buffer != 0 && of_buffer != tensor.element_bytes) {
      refuse("tensors[" + std::to_string(i) + "].element_bytes is " + std::to_string(tensor.element_bytes) +
             " where its buffer " + std::to_string(tensor.buffer) + " already has elements of " +
             std::to_string(of_buffer) + " bytes; a buffer holds one data type, give the other one its own");
    }
    of_buffer = tensor.element_bytes;
  }
  if (profile.link != LinkModel{}) {
    check_link(profile.link);
  }
}

void sort_by_urgency(Profile& profile) {
  if (!std::is_sorted(profile.tensors.begin(), profile.tensors.end(), more_urgent)) {
    std::stable_sort(profile.tensors.begin(), profile.tensors.end(), more_urgent);
  }
}

}  // namespace gradcast
