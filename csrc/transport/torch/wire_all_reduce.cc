#include "transport/torch/wire_all_reduce.h"

#include <algorithm>
#include <stdexcept>
#include <utility>

namespace gradcast {

namespace {

int64_t part_size_of(const Row& row, int world_size) {
  return (row.element_count() + world_size - 1) / world_size;
}

}  // namespace

int64_t Exchange::size_for(const Row& row, int world_size) {
  return world_size * part_size_of(row, world_size);
}

Exchange::Exchange(SharedGroup& group, const Row& row, const Memory& memory, int32_t number)
    : group_(group),
      row_(row),
      memory_(memory),
      rank_(group.group.getRank()),
      world_size_(group.group.getSize()),
      part_size_(part_size_of(row, world_size_)),
      scatter_tag_(2 * number),
      gather_tag_(2 * number + 1) {}

// That rank's part of the block; the last ones may be shorter, or empty.
at::Tensor Exchange::part(const at::Tensor& numbers, int rank) const {
  const int64_t first = std::min(rank * part_size_, row_.element_count());
  return numbers.narrow(0, first, std::min(part_size_, row_.element_count() - first));
}

// What that rank adds to the sums of this one.
at::Tensor Exchange::term(int rank) const {
  const at::Tensor own = part(memory_.sent, rank_);
  return rank == rank_ ? own : memory_.received.narrow(0, rank * part_size_, own.numel());
}

void Exchange::begin() noexcept {
  try {
    row_.read_into(memory_.sent, 0, row_.element_count());
    post();
  } catch (...) {
    failure_ = std::current_exception();
  }
}

void Exchange::post() {
  // All receives first, those of the gather too. Gloo sends nothing before the receiver has said that it waits for it, and what
  // a rank says queues behind what it sends: with its sends first, the two directions of a link take turns.
  for (int i = 1; i < world_size_; ++i) {
    const int from = (rank_ + world_size_ - i) % world_size_;
    receive(scattered_, term(from), from, scatter_tag_);
    receive(gathered_, part(memory_.sums, from), from, gather_tag_);
  }
  for (int i = 1; i < world_size_; ++i) {
    const int to = (rank_ + i) % world_size_;
    send(part(memory_.sent, to), to, scatter_tag_);
  }
}

void Exchange::finish(Adder& adder) {
  if (failure_ != nullptr) std::rethrow_exception(failure_);
  wait(scattered_);
  add_up(adder);
  wait(gathered_);
  row_.write(0, row_.element_count(), memory_.sums);
  wait(sent_);
}

void Exchange::add_up(Adder& adder) {
  std::vector<at::Tensor> terms;
  for (int rank = 0; rank < world_size_; ++rank)
    terms.push_back(term(rank));
  const at::Tensor sums = part(memory_.sums, rank_);
  adder.sum(sums, terms);
  for (int i = 1; i < world_size_; ++i)
    send(sums, (rank_ + i) % world_size_, gather_tag_);
}

void Exchange::abort() noexcept {
  const std::lock_guard lock(mutex_);
  aborted_ = true;
  for (const Works* works : {&scattered_, &gathered_, &sent_}) {
    for (const auto& work : *works) {
      try {
        work->abort();
      } catch (...) {
        // A backend that cannot; what waits for this message then waits until the group's timeout.
      }
    }
  }
}

// Bytes, since that is all that a message needs to know: not every backend knows 16-bit numbers.
void Exchange::receive(Works& works, const at::Tensor& numbers, int from, int tag) {
  if (numbers.numel() == 0) return;
  std::vector<at::Tensor> message = {numbers.view(at::kByte)};
  std::unique_lock lock(group_.mutex);
  auto work = group_.group.recv(message, from, tag);
  lock.unlock();
  keep(works, std::move(work));
}

void Exchange::send(const at::Tensor& numbers, int to, int tag) {
  if (numbers.numel() == 0) return;
  std::vector<at::Tensor> message = {numbers.view(at::kByte)};
  std::unique_lock lock(group_.mutex);
  auto work = group_.group.send(message, to, tag);
  lock.unlock();
  keep(sent_, std::move(work));
}

void Exchange::keep(Works& works, c10::intrusive_ptr<c10d::Work> work) {
  const std::lock_guard lock(mutex_);
  works.push_back(std::move(work));
  if (aborted_) throw std::runtime_error("the exchange was given up");
}

void Exchange::wait(const Works& works) {
  for (const auto& work : works) {
    if (!work->wait()) throw std::runtime_error("the exchange was given up");
  }
}

}  // namespace gradcast
