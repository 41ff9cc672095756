// The public class only forwards to the loop, so that gradcast/engine.h names no lock and no thread.
#include "engine/loop.h"

namespace gradcast {

Engine::Engine(Transport& transport, const EngineOptions& options)
    : loop_(std::make_unique<Loop>(transport, options)) {}

Engine::~Engine() {
  loop_->shutdown();
  if (loop_->is_abandoned()) {
    // Leaks the loop: the transport holds operations back after an abort and may still complete them, into this object.
    static_cast<void>(loop_.release());
  }
}

int64_t Engine::follow(const Profile& profile, const Plan& plan) {
  return loop_->follow(profile, plan);
}

int64_t Engine::begin() {
  return loop_->begin();
}

void Engine::on_ready(int32_t tensor) {
  loop_->on_ready(tensor);
}

bool Engine::wait(std::span<const int32_t> tensors, int64_t timeout_ns, Progress until) {
  return loop_->wait(tensors, timeout_ns, until);
}

bool Engine::wait_all(int64_t timeout_ns, Progress until) {
  return loop_->wait(std::nullopt, timeout_ns, until);
}

std::vector<int32_t> Engine::queued_no_later_than(std::span<const int32_t> tensors, int64_t position) const {
  return loop_->queued_no_later_than(tensors, position);
}

std::vector<int32_t> Engine::arrivals(int64_t position) const {
  return loop_->arrivals(position);
}

bool Engine::busy() const {
  return loop_->busy();
}

std::string Engine::waiting_for() const {
  return loop_->waiting_for();
}

std::vector<IterationRecord> Engine::timeline() const {
  return loop_->timeline();
}

EngineCounters Engine::counters() const {
  return loop_->counters();
}

void Engine::shutdown() {
  loop_->shutdown();
}

int64_t Engine::now_ns() {
  return steady_now_ns();
}

}  // namespace gradcast
