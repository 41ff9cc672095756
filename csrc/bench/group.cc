#include "bench/group.h"

#include <cstddef>
#include <cstring>

#include "platform/clock.h"

namespace gradcast {
namespace {

class HostMemory final : public Memory {
 public:
  HostMemory(int64_t size_bytes, Element element) : bytes_(static_cast<size_t>(size_bytes)), element_(element) {}

  HostBuffer buffer() override { return {bytes_.data(), static_cast<int64_t>(bytes_.size()), element_}; }
  void write(const void* bytes) override { std::memcpy(bytes_.data(), bytes, bytes_.size()); }
  void read(void* bytes) override { std::memcpy(bytes, bytes_.data(), bytes_.size()); }

 private:
  std::vector<std::byte> bytes_;
  const Element element_;
};

}  // namespace

std::unique_ptr<Memory> Group::make_memory(int64_t size_bytes, Element element) {
  return std::make_unique<HostMemory>(size_bytes, element);
}

void Group::compute_until(int64_t time_ns) {
  sleep_until(time_ns);
}

}  // namespace gradcast
