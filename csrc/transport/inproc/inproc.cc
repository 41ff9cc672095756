// The transports of an in-process world. They only forward to the wire, and keep it alive.
#include "gradcast/inproc.h"

#include <utility>

#include "transport/inproc/wire.h"

namespace gradcast {

class InprocWorld::RankTransport final : public Transport {
 public:
  RankTransport(std::shared_ptr<Wire> wire, int32_t rank) : wire_(std::move(wire)), rank_(rank) {}
  // The buffers may be freed next, so the wire must be done with them.
  ~RankTransport() override { wire_->dismiss(rank_); }

  int32_t rank() const noexcept override { return rank_; }
  int32_t world_size() const noexcept override { return wire_->world_size(); }
  void open(CompletionSink* sink) noexcept override { wire_->open(rank_, sink); }
  void start(const Operation& operation) noexcept override { wire_->start(rank_, operation); }
  void abort(const char* reason) noexcept override { wire_->abort(rank_, reason); }
  void close() noexcept override { wire_->close(rank_); }

 private:
  const std::shared_ptr<Wire> wire_;
  const int32_t rank_;
};

InprocWorld::InprocWorld(int32_t world_size, const InprocCost& cost)
    : wire_(std::make_shared<Wire>(world_size, cost)) {}

InprocWorld::~InprocWorld() = default;

int32_t InprocWorld::world_size() const {
  return wire_->world_size();
}

std::unique_ptr<Transport> InprocWorld::transport(int32_t rank, std::vector<HostBuffer> buffers) {
  wire_->admit(rank, std::move(buffers));
  return std::make_unique<RankTransport>(wire_, rank);
}

}  // namespace gradcast
