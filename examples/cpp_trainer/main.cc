// Data-parallel training from C++: libtorch computes, gradcast plans and carries the gradients.
//
// Four ranks, threads of this process over the in-process transport, whose emulated network takes 0.2 ms and 8 ns per byte for an
// operation; between hosts the same code runs over gradcast/mpi.h, with one process per rank. (Over gradcast/nccl.h it would wait
// for each gradient's kernel before on_ready().) Each rank trains the same model on its own numbers. The
// first steps measure; then the gradients travel as the plan says, under the next forward pass, which waits for each layer's
// parameters where it needs them.
#include <torch/torch.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <memory>
#include <thread>
#include <vector>

#include "gradcast/engine.h"
#include "gradcast/error.h"
#include "gradcast/inproc.h"
#include "gradcast/policy.h"

namespace {

constexpr int32_t kRanks = 4;
constexpr int64_t kLayers = 6;
constexpr int64_t kWidth = 256;
constexpr int64_t kBatch = 64;
constexpr int kMeasuredSteps = 3;
constexpr int kSteps = 60;
constexpr double kLearningRate = 1;
constexpr gradcast::InprocCost kNetwork{.alpha_ns = 200e3, .beta_ns_per_byte = 8};
constexpr int64_t kPatienceNs = 60'000'000'000;

// Calls back when a parameter's gradient is complete.
class WhenReady final : public torch::autograd::PostAccumulateGradHook {
 public:
  explicit WhenReady(std::function<void()> action) : action_(std::move(action)) {}
  void operator()(const at::Tensor&) override { action_(); }

 private:
  std::function<void()> action_;
};

// One rank's model, its gradients in one flat buffer, in the order in which forward needs them.
class Trainer {
 public:
  Trainer(gradcast::InprocWorld& world, int32_t rank) : rank_(rank) {
    torch::manual_seed(0);  // the same parameters on every rank
    for (int64_t i = 0; i < kLayers; ++i) {
      layers_.push_back(torch::nn::Linear(kWidth, kWidth));
      for (const at::Tensor& parameter : layers_.back()->parameters()) {
        parameters_.push_back(parameter);
        layer_of_.push_back(i);
      }
    }
    int64_t count = 0;
    for (const at::Tensor& parameter : parameters_) {
      count += parameter.numel();
    }
    gradients_ = torch::zeros(count);
    for (int64_t offset = 0; at::Tensor & parameter : parameters_) {
      parameter.mutable_grad() = gradients_.narrow(0, offset, parameter.numel()).view_as(parameter);
      offset += parameter.numel();
    }
    ready_ns_.resize(parameters_.size());
    for (size_t i = 0; i < parameters_.size(); ++i) {
      const auto said = [this, i] {
        ready_ns_[i] = now_ns() - backward_begin_ns_;
        if (engine_) {
          engine_->on_ready(static_cast<int32_t>(i));
        }
      };
      torch::autograd::impl::set_post_acc_grad_hooks(parameters_[i], std::make_unique<WhenReady>(said));
    }
    transport_ = world.transport(rank, {{gradients_.data_ptr(), 4 * count, gradcast::Element::kFloat32}});
  }

  // Nothing travels: what is measured is compute.
  void measure() {
    for (int step = 0; step < kMeasuredSteps; ++step) {
      loss().backward();
      backward_ns_ = now_ns() - backward_begin_ns_;
      gradients_.zero_();
    }
  }

  // When each gradient is ready and each parameter needed: what a plan is made from.
  gradcast::Profile profile() const {
    gradcast::Profile profile;
    profile.name = "cpp_trainer";
    profile.world_size = kRanks;
    profile.backward_ns = backward_ns_;
    profile.forward_ns = forward_ns_;
    for (size_t i = 0; i < parameters_.size(); ++i) {
      gradcast::Tensor tensor;
      tensor.name = "layer" + std::to_string(layer_of_[i]) + (i % 2 == 0 ? ".weight" : ".bias");
      tensor.bytes = 4 * parameters_[i].numel();
      tensor.ready_ns = std::min(ready_ns_[i], backward_ns_);
      tensor.need_ns = std::min(need_ns_[layer_of_[i]], forward_ns_);
      profile.tensors.push_back(tensor);
    }
    return profile;
  }

  void follow(const gradcast::Profile& profile, const gradcast::Plan& plan) {
    engine_ = std::make_unique<gradcast::Engine>(*transport_, gradcast::EngineOptions{});
    engine_->follow(profile, plan);
  }

  double step() {
    const at::Tensor value = loss();  // waits for the gradients of the step before, layer by layer
    gradients_.zero_();
    engine_->begin();
    is_pending_ = true;
    value.backward();
    return value.item<double>();
  }

  // The last step's gradients have no next forward pass that would wait for them.
  void finish() {
    for (int64_t layer = 0; layer < kLayers; ++layer) {
      update(layer);
    }
  }

  const std::vector<at::Tensor>& parameters() const { return parameters_; }

 private:
  static double now_ns() { return static_cast<double>(gradcast::Engine::now_ns()); }

  at::Tensor loss() {
    const at::Tensor inputs = torch::randn({kBatch, kWidth}, draw());
    at::Tensor hidden = inputs;
    const double begin_ns = now_ns();
    for (int64_t i = 0; i < kLayers; ++i) {
      need_ns_[i] = now_ns() - begin_ns;
      update(i);
      hidden = torch::tanh(layers_[i]->forward(hidden));
    }
    forward_ns_ = now_ns() - begin_ns;
    const at::Tensor value = (hidden - 0.5).square().mean();
    backward_begin_ns_ = now_ns();
    return value;
  }

  // Each rank has its own numbers, the same in each run.
  std::optional<at::Generator> draw() {
    generator_.set_current_seed(static_cast<uint64_t>(1000 * rank_ + draw_count_++));
    return generator_;
  }

  void update(int64_t layer) {
    if (!is_pending_) {
      return;
    }
    torch::NoGradGuard no_grad;
    for (size_t i = 0; i < parameters_.size(); ++i) {
      if (layer_of_[i] != layer) {
        continue;
      }
      const auto tensor = static_cast<int32_t>(i);
      if (!engine_->wait({&tensor, 1}, kPatienceNs)) {
        throw gradcast::Error(gradcast::ErrorCode::kCommunication, "after a minute " + engine_->waiting_for());
      }
      parameters_[i].sub_(parameters_[i].grad(), kLearningRate / kRanks);  // transports sum; DDP averages
    }
    is_pending_ = layer + 1 < kLayers;
  }

  const int32_t rank_;
  at::Generator generator_ = at::make_generator<at::CPUGeneratorImpl>(0);
  int64_t draw_count_ = 0;
  std::vector<torch::nn::Linear> layers_;
  std::vector<at::Tensor> parameters_;
  std::vector<int64_t> layer_of_;
  at::Tensor gradients_;
  std::vector<double> ready_ns_;
  double need_ns_[kLayers] = {};
  double backward_begin_ns_ = 0, backward_ns_ = 0, forward_ns_ = 0;
  bool is_pending_ = false;
  std::unique_ptr<gradcast::Transport> transport_;
  std::unique_ptr<gradcast::Engine> engine_;
};

template <typename Action>
void on_every_rank(const Action& action) {
  std::vector<std::thread> threads;
  for (int32_t rank = 0; rank < kRanks; ++rank) {
    threads.emplace_back([&action, rank] { action(rank); });
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
}

}  // namespace

int main() {
  torch::set_num_threads(1);
  gradcast::InprocWorld world(kRanks, kNetwork);
  std::vector<std::unique_ptr<Trainer>> trainers;
  for (int32_t rank = 0; rank < kRanks; ++rank) {
    trainers.push_back(std::make_unique<Trainer>(world, rank));
  }
  on_every_rank([&](int32_t rank) { trainers[rank]->measure(); });

  // Rank 0 plans; all ranks follow the same plan, as JSON carries it to other processes.
  gradcast::LinkModel link;
  link.all_reduce.pieces = {{.alpha_ns = kNetwork.alpha_ns, .beta_ns_per_byte = kNetwork.beta_ns_per_byte}};
  const gradcast::Profile profile = gradcast::profile_from_json(gradcast::to_json(trainers[0]->profile()));
  const gradcast::Plan plan = gradcast::make_plan(profile, link, {});
  const gradcast::Plan as_ddp = gradcast::make_plan(profile, link, {.policy = "ddp", .mode = gradcast::Mode::kHook});
  std::printf("%zu blocks, %.1f ms per step predicted; DDP's buckets would take %.1f\n", plan.blocks.size(),
              plan.predicted_ns / 1e6, as_ddp.predicted_ns / 1e6);

  std::vector<double> losses(kSteps);
  on_every_rank([&](int32_t rank) {
    trainers[rank]->follow(profile, plan);
    for (int step = 0; step < kSteps; ++step) {
      const double loss = trainers[rank]->step();
      if (rank == 0) {
        losses[step] = loss;
      }
    }
    trainers[rank]->finish();
  });
  std::printf("loss %.4f -> %.4f\n", losses.front(), losses.back());

  for (const auto& trainer : trainers) {
    for (size_t i = 0; i < trainer->parameters().size(); ++i) {
      if (!torch::equal(trainer->parameters()[i], trainers[0]->parameters()[i])) {
        std::fprintf(stderr, "the ranks have different parameters\n");
        return 1;
      }
    }
  }
  std::printf("all ranks have the same parameters\n");
  return losses.back() < losses.front() ? 0 : 1;
}
