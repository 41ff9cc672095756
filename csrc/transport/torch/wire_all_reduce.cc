#include "transport/torch/wire_all_reduce.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <utility>

#include "transport/torch/wire_codec.h"

namespace gradcast {

namespace {

// A message's tag names the operation and one of these.
enum Phase { kInside, kScatter, kGather, kShare, kPhaseCount };

constexpr int64_t kAlignmentBytes = 64;

// Adds `count` numbers to `sums`.
void add(const float* numbers, int64_t count, float* sums) {
  for (int64_t i = 0; i < count; ++i)
    sums[i] += numbers[i];
}

}  // namespace

WireAllReduce::WireAllReduce(SharedGroup& group, const WireTopology& topology, const WireBlock& block, int32_t number)
    : group_(group),
      topology_(topology),
      block_(block),
      pieces_(block.ranges, topology.world_size, block.encoding, block.segments),
      number_(number) {
  place_areas();
}

WireAllReduce::Area WireAllReduce::take(int64_t size_bytes) {
  const Area area{memory_bytes_, size_bytes};
  memory_bytes_ += (size_bytes + kAlignmentBytes - 1) / kAlignmentBytes * kAlignmentBytes;
  return area;
}

// The ranks that share a local number, in rank order: all numbers of these owners meet, on this host, at one rank.
std::vector<int> WireAllReduce::owners_of(int local_number) const {
  std::vector<int> owners;
  for (int rank = 0; rank < topology_.world_size; ++rank) {
    if (this->local_number(rank) == local_number) owners.push_back(rank);
  }
  return owners;
}

void WireAllReduce::place_areas() {
  const int own = topology_.rank;
  sums_.resize(static_cast<size_t>(topology_.world_size));
  for (const int local : topology_.locals) {
    Area share{memory_bytes_, 0};
    int64_t element_count = 0;
    for (const int owner : owners_of(local_number(local))) {
      sums_[static_cast<size_t>(owner)] = take(pieces_.encoded_bytes(owner));
      if (topology_.has_two_levels()) element_count += pieces_.element_count(owner);
    }
    share.size_bytes = memory_bytes_ - share.offset;
    shares_.push_back(share);
    inside_out_.push_back(take(local == own ? 0 : element_count * static_cast<int64_t>(sizeof(float))));
  }
  int64_t own_count = 0;
  for (const int owner : topology_.across) {
    encoded_.push_back(take(pieces_.encoded_bytes(owner)));
    received_.push_back(take(owner == own ? 0 : pieces_.encoded_bytes(own)));
    if (topology_.has_two_levels()) own_count += pieces_.element_count(owner);
  }
  for (const int local : topology_.locals)
    inside_in_.push_back(take(local == own ? 0 : own_count * static_cast<int64_t>(sizeof(float))));
}

std::byte* WireAllReduce::bytes_at(const Area& area) const {
  return static_cast<std::byte*>(memory_.data_ptr()) + area.offset;
}

void WireAllReduce::begin(const at::Tensor& memory) noexcept {
  memory_ = memory;
  try {
    post();
    if (topology_.has_two_levels()) {
      send_inside_host();
    } else {
      send_encoded();
    }
  } catch (...) {
    failure_ = std::current_exception();
  }
}

// Posts all receives first. Gloo sends nothing before the receiver has announced that it is waiting, and announcements
// queue behind data: with the sends first, the two directions of a link would take turns.
void WireAllReduce::post() {
  for (size_t i = 0; i < topology_.locals.size(); ++i) {
    const int local = topology_.locals[i];
    if (local == topology_.rank) continue;
    receive(inside_, inside_in_[i], local, kInside);
    receive(shared_, shares_[i], local, kShare);
  }
  for (size_t i = 0; i < topology_.across.size(); ++i) {
    const int peer = topology_.across[i];
    if (peer == topology_.rank) continue;
    receive(scattered_, received_[i], peer, kScatter);
    receive(gathered_, sums_[static_cast<size_t>(peer)], peer, kGather);
  }
}

void WireAllReduce::send_inside_host() {
  for (size_t i = 0; i < topology_.locals.size(); ++i) {
    const int local = topology_.locals[i];
    if (local == topology_.rank) continue;
    auto* out = reinterpret_cast<float*>(bytes_at(inside_out_[i]));
    for (const int owner : owners_of(local_number(local))) {
      pieces_.for_each(owner,
                       [&](const Piece& piece) { out = std::copy_n(numbers() + piece.first, piece.count, out); });
    }
    send(inside_out_[i], local, kInside);
  }
}

// Adds the numbers of this host's ranks in rank order, in place of this rank's own.
void WireAllReduce::sum_inside_host() {
  rethrow();
  wait(inside_);
  std::vector<const float*> terms;
  for (const Area& area : inside_in_)
    terms.push_back(reinterpret_cast<const float*>(bytes_at(area)));
  std::vector<float> own(static_cast<size_t>(kPieceElements));
  for (const int owner : topology_.across) {
    pieces_.for_each(owner, [&](const Piece& piece) {
      float* sums = numbers() + piece.first;
      std::copy_n(sums, piece.count, own.data());
      for (size_t i = 0; i < terms.size(); ++i) {
        const bool is_own = topology_.locals[i] == topology_.rank;
        const float* term = is_own ? own.data() : std::exchange(terms[i], terms[i] + piece.count);
        if (i == 0) {
          std::copy_n(term, piece.count, sums);
        } else {
          add(term, piece.count, sums);
        }
      }
    });
  }
  send_encoded();
}

// This rank's own numbers are encoded as well: the sum is the same whoever makes it.
void WireAllReduce::send_encoded() {
  for (size_t i = 0; i < topology_.across.size(); ++i) {
    const int owner = topology_.across[i];
    std::byte* out = bytes_at(encoded_[i]);
    pieces_.for_each(owner, [&](const Piece& piece) {
      encode_piece(piece, numbers(), residual(), out);
      out += piece.encoded_bytes();
    });
    if (owner != topology_.rank) send(encoded_[i], owner, kScatter);
  }
}

void WireAllReduce::sum_between_hosts() {
  rethrow();
  wait(scattered_);
  std::vector<const std::byte*> terms;
  for (size_t i = 0; i < topology_.across.size(); ++i)
    terms.push_back(bytes_at(topology_.across[i] == topology_.rank ? encoded_[i] : received_[i]));
  const Area& own = sums_[static_cast<size_t>(topology_.rank)];
  std::byte* out = bytes_at(own);
  std::vector<float> sum(static_cast<size_t>(kPieceElements)), term(sum.size());
  pieces_.for_each(topology_.rank, [&](const Piece& piece) {
    for (size_t i = 0; i < terms.size(); ++i) {
      decode_piece(piece, std::exchange(terms[i], terms[i] + piece.encoded_bytes()), i == 0 ? sum.data() : term.data());
      if (i > 0) add(term.data(), piece.count, sum.data());
    }
    encode_sum(piece, sum.data(), residual(), out);
    out += piece.encoded_bytes();
  });
  for (const int peer : topology_.across) {
    if (peer != topology_.rank) send(own, peer, kGather);
  }
}

void WireAllReduce::gather() {
  rethrow();
  wait(gathered_);
  for (size_t i = 0; i < topology_.locals.size(); ++i) {
    const auto self = std::find(topology_.locals.begin(), topology_.locals.end(), topology_.rank);
    const Area& share = shares_[static_cast<size_t>(self - topology_.locals.begin())];
    if (topology_.locals[i] != topology_.rank) send(share, topology_.locals[i], kShare);
  }
  wait(shared_);
  for (int owner = 0; owner < topology_.world_size; ++owner) {
    const std::byte* in = bytes_at(sums_[static_cast<size_t>(owner)]);
    pieces_.for_each(owner, [&](const Piece& piece) {
      decode_piece(piece, in, numbers() + piece.first);
      in += piece.encoded_bytes();
    });
  }
  wait(sent_);
}

void WireAllReduce::abort() noexcept {
  MutexLock lock(mutex_);
  aborted_ = true;
  for (const Works* works : {&inside_, &scattered_, &gathered_, &shared_, &sent_}) {
    for (const auto& work : *works) {
      try {
        work->abort();
      } catch (...) {
        // The backend cannot abort; the step then waits for this message until the group's timeout.
      }
    }
  }
}

void WireAllReduce::receive(Works& works, const Area& area, int from, int phase) {
  message(works, area, [&](auto& bytes) { return group_.group.recv(bytes, from, number_ * kPhaseCount + phase); });
}

void WireAllReduce::send(const Area& area, int to, int phase) {
  message(sent_, area, [&](auto& bytes) { return group_.group.send(bytes, to, number_ * kPhaseCount + phase); });
}

template <typename Start>
void WireAllReduce::message(Works& works, const Area& area, const Start& start) {
  if (area.size_bytes == 0) return;
  std::vector<at::Tensor> bytes = {memory_.narrow(0, area.offset, area.size_bytes)};
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

void WireAllReduce::rethrow() const {
  if (failure_ != nullptr) std::rethrow_exception(failure_);
}

}  // namespace gradcast
