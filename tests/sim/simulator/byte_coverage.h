// Checks that the operations of one iteration carry every byte exactly once. It counts bytes and knows nothing of
// plans.
//
// One instance serves all ranks, because the simulator compares their operations first.
//
// Thread safety: pure; any thread.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "gradcast/plan.h"
#include "gradcast/profile.h"

namespace gradcast::sim {

class ByteCoverage {
 public:
  explicit ByteCoverage(const Profile& profile);

  // An operation that all ranks have started.
  void add(const Block& block);
  // Ends an iteration. Returns what is wrong with it, if anything, and starts over.
  std::optional<std::string> finish();

 private:
  struct BufferBytes {
    int64_t size_bytes = 0;
    std::vector<Range> reduced;   // by all-reduces and reduce-scatters
    std::vector<Range> finished;  // by all-reduces and all-gathers
  };
  std::vector<BufferBytes> buffers_;  // by buffer
};

}  // namespace gradcast::sim
