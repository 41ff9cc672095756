// Ranks with gradients, engines and an in-process network: what training is, without a model.
//
// Gradients are small whole numbers, so that their sums are exact in float32 and no tolerance hides a wrong byte.
//
// Thread safety: any thread, each rank's gradients one at a time.
#pragma once

#include <gtest/gtest.h>

#include <chrono>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "gradcast/engine.h"
#include "tests/core/hand_profiles.h"
#include "tests/engine/hand_transport.h"
#include "tests/engine/random_iterations.h"
#include "tests/support/scripted_world.h"

namespace gradcast {

class EngineRanks {
 public:
  EngineRanks(int32_t world_size, Profile profile, const InprocCost& cost = {}, const EngineOptions& options = {})
      : world(world_size, cost), profile_(std::move(profile)) {
    std::vector<int64_t> buffer_bytes;
    for (const Tensor& tensor : profile_.tensors) {
      buffer_bytes.resize(std::max(buffer_bytes.size(), static_cast<size_t>(tensor.buffer) + 1), 0);
      offsets_.push_back(buffer_bytes[tensor.buffer]);
      buffer_bytes[tensor.buffer] += tensor.bytes;
    }
    for (int32_t rank = 0; rank < world_size; ++rank) {
      ranks_.push_back(std::make_unique<Rank>());
      std::vector<HostBuffer> buffers;
      for (size_t buffer = 0; buffer < buffer_bytes.size(); ++buffer) {
        std::vector<double>& memory = ranks_[rank]->memory.emplace_back(buffer_bytes[buffer] / 8 + 1);
        buffers.push_back(
            {memory.data(), buffer_bytes[buffer],
             element_bytes_of(static_cast<int32_t>(buffer)) == 4 ? Element::kFloat32 : Element::kFloat64});
      }
      ranks_[rank]->transport = world.transport(rank, std::move(buffers));
      ranks_[rank]->engine = std::make_unique<Engine>(*ranks_[rank]->transport, options);
    }
  }

  int32_t world_size() const { return static_cast<int32_t>(ranks_.size()); }
  int32_t tensor_count() const { return static_cast<int32_t>(profile_.tensors.size()); }
  const Profile& profile() const { return profile_; }
  Engine& engine(int32_t rank) { return *ranks_[rank]->engine; }
  void destroy_engine(int32_t rank) { ranks_[rank]->engine.reset(); }

  // The rank's own gradient of a tensor, then the word that it exists.
  void give(int32_t rank, int32_t tensor, int64_t iteration) {
    const int64_t count = profile_.tensors[tensor].bytes / profile_.tensors[tensor].element_bytes;
    for (int64_t i = 0; i < count; ++i) {
      set(rank, tensor, i, gradient(rank, tensor, iteration, i));
    }
    engine(rank).on_ready(tensor);
  }
  void give_all(int32_t rank, int64_t iteration) {
    for (int32_t tensor = tensor_count() - 1; tensor >= 0; --tensor) {
      give(rank, tensor, iteration);
    }
  }

  // What the rank holds in a tensor is the sum over all ranks.
  void expect_sum(int32_t rank, int32_t tensor, int64_t iteration) {
    const int64_t count = profile_.tensors[tensor].bytes / profile_.tensors[tensor].element_bytes;
    for (int64_t i = 0; i < count; ++i) {
      double sum = 0;
      for (int32_t other = 0; other < world_size(); ++other) {
        sum += gradient(other, tensor, iteration, i);
      }
      ASSERT_EQ(get(rank, tensor, i), sum)
          << "rank " << rank << ", tensor " << tensor << ", element " << i << ", iteration " << iteration;
    }
  }
  void expect_all_sums(int32_t rank, int64_t iteration) {
    for (int32_t tensor = 0; tensor < tensor_count(); ++tensor) {
      expect_sum(rank, tensor, iteration);
    }
  }

  // Runs an action for each rank on a thread of its own, to the end.
  void on_every_rank(const std::function<void(int32_t rank)>& action) {
    std::vector<std::thread> threads;
    for (int32_t rank = 0; rank < world_size(); ++rank) {
      threads.emplace_back([&action, rank] { action(rank); });
    }
    for (std::thread& thread : threads) {
      thread.join();
    }
  }

  ScriptedWorld world;

 private:
  struct Rank {
    std::vector<std::vector<double>> memory;  // by buffer; of doubles, so that it is aligned for both kinds
    std::unique_ptr<Transport> transport;
    std::unique_ptr<Engine> engine;
  };

  static double gradient(int32_t rank, int32_t tensor, int64_t iteration, int64_t element) {
    return static_cast<double>((31 * (rank + 1) + 17 * tensor + 13 * iteration + 7 * element) % 97);
  }

  char* place(int32_t rank, int32_t tensor, int64_t element) {
    const Tensor& shape = profile_.tensors[tensor];
    return reinterpret_cast<char*>(ranks_[rank]->memory[shape.buffer].data()) + offsets_[tensor] +
           element * shape.element_bytes;
  }
  void set(int32_t rank, int32_t tensor, int64_t element, double value) {
    const auto narrow = static_cast<float>(value);
    const bool is_float = profile_.tensors[tensor].element_bytes == 4;
    std::memcpy(place(rank, tensor, element), is_float ? static_cast<const void*>(&narrow) : &value, is_float ? 4 : 8);
  }
  double get(int32_t rank, int32_t tensor, int64_t element) {
    float narrow = 0;
    double value = 0;
    const bool is_float = profile_.tensors[tensor].element_bytes == 4;
    std::memcpy(is_float ? static_cast<void*>(&narrow) : &value, place(rank, tensor, element), is_float ? 4 : 8);
    return is_float ? static_cast<double>(narrow) : value;
  }

  Profile profile_;
  std::vector<int64_t> offsets_;  // by tensor, in its buffer
  std::vector<std::unique_ptr<Rank>> ranks_;
};

// Tensors of float32 in one buffer.
inline Profile float_tensors(int32_t count, int64_t elements = 10) {
  Profile profile = profile_of(0, 0, std::vector<Item>(static_cast<size_t>(count), {4 * elements}));
  for (Tensor& tensor : profile.tensors) {
    tensor.element_bytes = 4;
  }
  return profile;
}

// One all-reduce per tensor of float_tensors, the last tensor first, as backward makes them.
inline Plan block_per_tensor(const Profile& profile, int32_t in_flight = 1) {
  std::vector<Block> blocks;
  int64_t end_bytes = 0;
  for (const Tensor& tensor : profile.tensors) {
    blocks.insert(blocks.begin(), block_of({{end_bytes, end_bytes + tensor.bytes}}));
    end_bytes += tensor.bytes;
  }
  return plan_of(blocks, Mode::kOverlap, in_flight);
}

}  // namespace gradcast
