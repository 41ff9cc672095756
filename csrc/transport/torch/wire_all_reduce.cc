#include "transport/torch/wire_all_reduce.h"

#include <stdexcept>
#include <utility>

#include "transport/common/parts.h"

namespace gradcast {

int64_t WireAllReduce::size_for(const RangeViews& views, int world_size) {
  return world_size * part_size(views.element_count(), world_size);
}

WireAllReduce::WireAllReduce(SharedGroup& group, const RangeViews& views, const Memory& memory, int32_t number)
    : group_(group),
      views_(views),
      memory_(memory),
      rank_(group.group.getRank()),
      world_size_(group.group.getSize()),
      part_size_(part_size(views.element_count(), world_size_)),
      scatter_tag_(2 * number),
      gather_tag_(2 * number + 1) {}

// The part of the block that `rank` owns; the last parts may be shorter, or empty.
at::Tensor WireAllReduce::part(const at::Tensor& numbers, int rank) const {
  const Part part = part_of(rank, world_size_, views_.element_count());
  return numbers.narrow(0, part.first, part.count());
}

// The numbers that `rank` contributes to this rank's part.
at::Tensor WireAllReduce::term(int rank) const {
  const at::Tensor own = part(memory_.sent, rank_);
  return rank == rank_ ? own : memory_.received.narrow(0, rank * part_size_, own.numel());
}

void WireAllReduce::begin() noexcept {
  try {
    views_.read_into(memory_.sent, 0, views_.element_count());
    post();
  } catch (...) {
    failure_ = std::current_exception();
  }
}

void WireAllReduce::post() {
  // Posts all receives first, also those of the gather. Gloo sends nothing before the receiver has announced that it is
  // waiting, and announcements queue behind data: with the sends first, the two directions of a link would take turns.
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

// Sums this rank's part as soon as all terms of it are here; the other parts arrive meanwhile.
void WireAllReduce::finish(Adder& adder) {
  if (failure_ != nullptr) std::rethrow_exception(failure_);
  wait(scattered_);
  add_up(adder);
  wait(gathered_);
  views_.write(0, views_.element_count(), memory_.sums);
  wait(sent_);
}

void WireAllReduce::add_up(Adder& adder) {
  std::vector<at::Tensor> terms;
  for (int rank = 0; rank < world_size_; ++rank)
    terms.push_back(term(rank));
  const at::Tensor sums = part(memory_.sums, rank_);
  adder.sum(sums, terms);
  for (int i = 1; i < world_size_; ++i)
    send(sums, (rank_ + i) % world_size_, gather_tag_);
}

void WireAllReduce::abort() noexcept {
  MutexLock lock(mutex_);
  aborted_ = true;
  for (const Works* works : {&scattered_, &gathered_, &sent_}) {
    for (const auto& work : *works) {
      try {
        work->abort();
      } catch (...) {
        // The backend cannot abort; finish() then waits for this message until the group's timeout.
      }
    }
  }
}

void WireAllReduce::receive(Works& works, const at::Tensor& numbers, int from, int tag) {
  message(works, numbers, [&](auto& bytes) { return group_.group.recv(bytes, from, tag); });
}

void WireAllReduce::send(const at::Tensor& numbers, int to, int tag) {
  message(sent_, numbers, [&](auto& bytes) { return group_.group.send(bytes, to, tag); });
}

// Messages carry bytes, because not every backend knows 16-bit numbers.
template <typename Start>
void WireAllReduce::message(Works& works, const at::Tensor& numbers, const Start& start) {
  if (numbers.numel() == 0) return;
  std::vector<at::Tensor> bytes = {numbers.view(at::kByte)};
  MutexLock group_lock(group_.mutex);
  auto work = start(bytes);
  group_lock.unlock();
  MutexLock lock(mutex_);
  works.push_back(std::move(work));
  // An abort that came between the call and this line has not seen the work, so it is repeated here.
  if (aborted_) throw std::runtime_error("the operation was given up");
}

void WireAllReduce::wait(const Works& works) {
  for (const auto& work : works) {
    if (!work->wait()) throw std::runtime_error("the operation was given up");
  }
}

}  // namespace gradcast
