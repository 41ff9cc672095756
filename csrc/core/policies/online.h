// Shared parts of the literature's policies: the queue of ready tensors, the sizes that their tuners try, and limits on
// how finely they cut.
//
// A policy that its paper describes as a running scheduler is played over the profile: at each instant it sees the
// tensors that are ready by then, picks what to send, and the wire takes its time. Between two events (a tensor
// becomes ready, an operation finishes) it does not change its mind; ties go to the more urgent tensor.
//
// Thread safety: pure; any thread.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "cost/pieces.h"

namespace gradcast {

// The bytes that are ready and not sent yet, the most urgent tensor on top; each tensor is sent from its front.
class ReadyQueue {
 public:
  // `arrivals` is by_ready(problem). `rank` gives a tensor's priority by tensor index, all different, the lowest on
  // top; empty: urgency. REQUIRES: both outlive the queue.
  ReadyQueue(const Problem& problem, std::span<const int32_t> arrivals, std::span<const int32_t> rank = {});

  // Admits the tensors that are ready by now_ns.
  void admit(double now_ns);
  void admit_all();
  bool empty() const { return heap_.empty(); }
  // When the first tensor that is not admitted yet becomes ready; infinity if there is none.
  double next_ready_ns() const;
  bool finished() const { return empty() && admitted_count_ == arrivals_.size(); }

  // The rest of the tensor on top. REQUIRES: !empty().
  Piece top() const;
  // Sends the first `size_bytes` of top(), or all of it where it has no more.
  Piece take(int64_t size_bytes);
  int64_t sent_bytes(int32_t tensor) const { return sent_bytes_[tensor]; }

 private:
  auto below() const {
    return [this](int32_t a, int32_t b) { return rank_.empty() ? a > b : rank_[a] > rank_[b]; };
  }

  const Problem* problem_;
  std::span<const int32_t> arrivals_;
  std::span<const int32_t> rank_;
  size_t admitted_count_ = 0;
  std::vector<int32_t> heap_;
  std::vector<int64_t> sent_bytes_;
};

// ByteScheduler's untuned partition, its relatives, and one fine enough for the fastest gaps.
inline constexpr int64_t kUnitsBytes[] = {16'000'000, 4'000'000, 1'000'000, 250'000};
// The sizes that a tuner tries: the given one or, where that is 0, all of `tuned_bytes`.
std::vector<int64_t> sizes_to_try(int64_t given_bytes, std::span<const int64_t> tuned_bytes);

// The unit of `unit_bytes` in whole elements of a tensor: rounded down, at least one element.
int64_t whole_elements_bytes(const Problem& problem, int32_t tensor, int64_t unit_bytes);
// The number of units of at most `unit_bytes`, each tensor cut on its own.
double unit_count(const Problem& problem, int64_t unit_bytes);

// The iteration time of a plan that sends each piece as an all-reduce of its own: iteration_ns() of problem.h without
// building the blocks, for tuners that compare many orders.
double pieces_iteration_ns(const Problem& problem, std::span<const Piece> pieces);

// Plans above this many blocks are refused: no run follows a million operations per iteration, and they fill the
// memory.
inline constexpr double kBlockCountMax = 1'000'000;
// Throws Error{kInvalidOption} naming the parameter to raise.
void check_block_count(double block_count, const char* parameter);

}  // namespace gradcast
