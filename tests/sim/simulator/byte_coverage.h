// Every byte once: the books of what the operations of one iteration carry, kept by bytes and not by plans.
//
// One book serves all ranks, because their operations are compared before they are entered here.
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

class Ledger {
 public:
  explicit Ledger(const Profile& profile);

  // An operation that all ranks have started.
  void enter(const Block& block);
  // Ends an iteration: what is wrong with it, as a sentence, or nothing; then the books are empty again.
  std::optional<std::string> close();

 private:
  struct Book {
    int64_t size_bytes = 0;
    std::vector<Range> reduced;   // by all-reduces and reduce-scatters
    std::vector<Range> finished;  // by all-reduces and all-gathers
  };
  std::vector<Book> books_;  // by buffer
};

}  // namespace gradcast::sim
