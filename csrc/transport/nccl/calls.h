// Helpers for calls of CUDA and NCCL: errors as messages, element types, and the current device.
//
// Thread safety: pure; any thread.
#pragma once

#include <cuda_runtime_api.h>
#include <nccl.h>

#include <cstdint>
#include <memory>
#include <string>

#include "gradcast/nccl.h"

namespace gradcast {

inline ncclDataType_t type_of(Element element) {
  return element == Element::kBFloat16 ? ncclBfloat16 : element == Element::kFloat32 ? ncclFloat32 : ncclFloat64;
}

// Throw Error{kCommunication}: "CUDA could not make a stream: ...".
void require(cudaError_t error, const std::string& action);
// ncclInProgress is no error: it means that a non-blocking communicator has accepted the call.
void require(ncclResult_t result, const std::string& action, ncclComm_t communicator = nullptr);

int32_t nccl_version();
std::string version_text(int32_t version);  // "2.28.9"

using Event = std::unique_ptr<CUevent_st, decltype([](cudaEvent_t event) { cudaEventDestroy(event); })>;
using Stream = std::unique_ptr<CUstream_st, decltype([](cudaStream_t stream) { cudaStreamDestroy(stream); })>;

// Makes a device the calling thread's current one for a scope.
class OnDevice {
 public:
  explicit OnDevice(int32_t device);
  ~OnDevice();
  OnDevice(const OnDevice&) = delete;
  OnDevice& operator=(const OnDevice&) = delete;

 private:
  int device_ = 0;
  int before_ = 0;
};

}  // namespace gradcast
