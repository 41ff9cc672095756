// One process as rank 1 of two ranks that are alike, over a backend of the test's own that passes for NCCL or not.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/types.h>

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "transport/torch/collective.h"

namespace {

constexpr int kRank = 1;
constexpr int kRanks = 2;

struct Done : c10d::Work {
  bool wait(std::chrono::milliseconds /*timeout*/) override { return true; }
};

class Alike final : public c10d::Backend {
 public:
  explicit Alike(std::string name) : Backend(kRank, kRanks), name_(std::move(name)) {}

  const std::string getBackendName() const override { return name_; }

  c10::intrusive_ptr<c10d::Work> allreduce(std::vector<at::Tensor>& tensors,
                                           const c10d::AllreduceOptions& options) override {
    asynchronous.push_back(options.asyncOp);
    tensors[0].mul_(kRanks);
    return c10::make_intrusive<Done>();
  }

  c10::intrusive_ptr<c10d::Work> _reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                                                      const c10d::ReduceScatterOptions& options) override {
    asynchronous.push_back(options.asyncOp);
    const int64_t size = output.numel();
    is_shared = output.data_ptr() == input.narrow(0, kRank * size, size).data_ptr();
    output.copy_(input.narrow(0, kRank * size, size) * kRanks);
    return c10::make_intrusive<Done>();
  }

  c10::intrusive_ptr<c10d::Work> _allgather_base(at::Tensor& output, at::Tensor& input,
                                                 const c10d::AllgatherOptions& options) override {
    asynchronous.push_back(options.asyncOp);
    const int64_t size = input.numel();
    is_shared = input.data_ptr() == output.narrow(0, kRank * size, size).data_ptr();
    const at::Tensor own = input.clone();
    for (int rank = 0; rank < kRanks; ++rank)
      output.narrow(0, rank * size, size).copy_(own);
    return c10::make_intrusive<Done>();
  }

  // Both ranks have sent this one the part that is this rank's.
  c10::intrusive_ptr<c10d::Work> alltoall_base(at::Tensor& output, at::Tensor& input,
                                               std::vector<int64_t>& /*output_sizes*/,
                                               std::vector<int64_t>& /*input_sizes*/,
                                               const c10d::AllToAllOptions& options) override {
    asynchronous.push_back(options.asyncOp);
    const int64_t size = input.numel() / kRanks;
    for (int rank = 0; rank < kRanks; ++rank)
      output.narrow(0, rank * size, size).copy_(input.narrow(0, kRank * size, size));
    return c10::make_intrusive<Done>();
  }

  bool is_shared = false;
  std::vector<bool> asynchronous;  // torch's flag of each operation

 private:
  const std::string name_;
};

c10::intrusive_ptr<c10d::ProcessGroup> group_of(const c10::intrusive_ptr<Alike>& alike) {
  auto group = c10::make_intrusive<c10d::ProcessGroup>(kRank, kRanks);
  group->setBackend(c10::DeviceType::CPU, c10d::ProcessGroup::BackendType::CUSTOM, alike);
  return group;
}

gradcast::RangeViews views_of(const at::Tensor& buffer, const std::vector<std::pair<int64_t, int64_t>>& ranges) {
  std::vector<gradcast::Range> given;
  for (const auto& [lo_bytes, hi_bytes] : ranges)
    given.push_back({lo_bytes, hi_bytes});
  return {buffer, given};
}

// Elements 0, 1, 2, ... of fp32 after the operation on these ranges of bytes, and whether this rank's part lay in the
// block.
std::pair<at::Tensor, bool> carry(const std::string& backend, bool scatters, int64_t count,
                                  const std::vector<std::pair<int64_t, int64_t>>& ranges) {
  const auto alike = c10::make_intrusive<Alike>(backend);
  const at::Tensor buffer = torch::arange(count, torch::kFloat);
  const auto op = scatters ? gradcast::Op::kReduceScatter : gradcast::Op::kAllGather;
  const gradcast::Collective started = gradcast::start_collective(*group_of(alike), op, views_of(buffer, ranges));
  if (started.unpack) started.unpack();
  return {buffer, alike->is_shared};
}

// The flags of the operations of each kind, the last one on a narrow wire, and what they leave of elements 0, 1, 2, ...
std::pair<std::vector<bool>, std::vector<at::Tensor>> carry_all(bool on_current_stream) {
  using gradcast::RunsOn;
  const auto alike = c10::make_intrusive<Alike>("nccl");
  const auto group = group_of(alike);
  const RunsOn runs_on = on_current_stream ? RunsOn::kCurrentStream : RunsOn::kOwnStream;
  std::vector<at::Tensor> left;
  const auto buffer = [&] { return left.emplace_back(torch::arange(6, torch::kFloat)); };
  const std::vector<std::pair<int64_t, int64_t>> ranges = {{4, 12}, {16, 20}};
  for (const gradcast::Op op : {gradcast::Op::kAllReduce, gradcast::Op::kReduceScatter, gradcast::Op::kAllGather})
    gradcast::start_collective(*group, op, views_of(buffer(), ranges), runs_on).unpack();
  gradcast::start_wire_all_reduce_on_stream(*group, views_of(buffer(), ranges), at::kBFloat16, runs_on).unpack();
  return {alike->asynchronous, left};
}

// Sums these ranges of the buffer as 16-bit numbers.
void sum_narrow(const at::Tensor& buffer, const std::vector<std::pair<int64_t, int64_t>>& ranges, at::ScalarType wire) {
  const auto group = group_of(c10::make_intrusive<Alike>("nccl"));
  gradcast::start_wire_all_reduce_on_stream(*group, views_of(buffer, ranges), wire).unpack();
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  module.def("carry", carry);
  module.def("carry_all", carry_all);
  module.def("sum_narrow", sum_narrow);
}
