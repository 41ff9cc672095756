// The C++ part of gradcast.comm_hook: averages a DDP bucket in pieces over a process group of gradcast's own.
//
// Thread safety: any thread on which DDP calls its hook. What follows runs on the backend's thread, without the GIL.
#pragma once

#include <ATen/core/ivalue.h>

#include <cstdint>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/comm.hpp>

namespace gradcast {

// Averages the bucket over the ranks, in place: multiplies by 1 / ranks, then sums, in pieces of at most `piece_bytes`
// in memory order. The future's value is `result`, the bucket's tensor as Python knows it, because DDP takes nothing
// else from a hook that is registered in Python. Throws what the backend throws.
c10::intrusive_ptr<c10::ivalue::Future> average_bucket(c10d::ProcessGroup& group, const c10d::GradBucket& bucket,
                                                       int64_t piece_bytes, c10::IValue result);

}  // namespace gradcast
