// An engine over a transport by hand. It follows one block per tensor, the last tensor first.
//
// Thread safety: any thread, as its engine.
#pragma once

#include <memory>

#include "gradcast/engine.h"
#include "tests/engine/engine_ranks.h"
#include "tests/engine/hand_transport.h"

namespace gradcast {

struct HandEngine {
  using Manner = HandTransport::Manner;

  explicit HandEngine(int32_t tensor_count, int32_t in_flight = 1, Manner manner = Manner::kByHand,
                      const EngineOptions& options = {})
      : profile(float_tensors(tensor_count)),
        own_transport(std::make_shared<HandTransport>(manner)),
        own_engine(std::make_unique<Engine>(*own_transport, options)) {
    engine.follow(profile, block_per_tensor(profile, in_flight));
  }

  // Begins an iteration and gives it all gradients, as backward does. Returns the engine's number of it.
  int64_t begin_with_all() {
    const int64_t iteration = engine.begin();
    for (auto tensor = static_cast<int32_t>(profile.tensors.size()) - 1; tensor >= 0; --tensor) {
      engine.on_ready(tensor);
    }
    return iteration;
  }

  const Profile profile;
  const std::shared_ptr<HandTransport> own_transport;
  std::unique_ptr<Engine> own_engine;
  HandTransport& transport = *own_transport;
  Engine& engine = *own_engine;
};

// One that has been given all gradients.
struct BusyEngine : HandEngine {
  explicit BusyEngine(int32_t tensor_count, int32_t in_flight = 1, Manner manner = Manner::kByHand,
                      const EngineOptions& options = {})
      : HandEngine(tensor_count, in_flight, manner, options) {
    begin_with_all();
  }
};

using Tensors = std::vector<int32_t>;  // their numbers

}  // namespace gradcast
