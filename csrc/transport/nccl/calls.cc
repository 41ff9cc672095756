#include "transport/nccl/calls.h"

#include "gradcast/error.h"

namespace gradcast {

void require(cudaError_t error, const std::string& action) {
  if (error == cudaErrorMemoryAllocation) {
    throw Error(ErrorCode::kCommunication, "the device has no memory left to " + action +
                                               "; give a smaller batch, or a policy that sends smaller blocks");
  }
  if (error != cudaSuccess) {
    throw Error(ErrorCode::kCommunication, "CUDA could not " + action + ": " + cudaGetErrorString(error));
  }
}

void require(ncclResult_t result, const std::string& action, ncclComm_t communicator) {
  if (result != ncclSuccess && result != ncclInProgress) {
    const char* detail = ncclGetLastError(communicator);
    const std::string words = detail == nullptr ? "" : detail;
    // Before and since NCCL 2.30.
    if (words.find("Duplicate GPU") != std::string::npos || words.find("using the same GPU") != std::string::npos) {
      throw Error(ErrorCode::kInvalidUse,
                  "two ranks use the same device, which NCCL refuses; start one rank per device, and "
                  "give each its own in NcclOptions::device (" +
                      words + ")");
    }
    throw Error(result == ncclInvalidUsage ? ErrorCode::kInvalidUse : ErrorCode::kCommunication,
                "NCCL could not " + action + ": " + ncclGetErrorString(result) + (words.empty() ? "" : "; " + words));
  }
}

int32_t nccl_version() {
  int version = 0;
  require(ncclGetVersion(&version), "say its version");
  return version;
}

std::string version_text(int32_t version) {
  return std::to_string(version / 10000) + "." + std::to_string(version / 100 % 100) + "." +
         std::to_string(version % 100);
}

std::string nccl_version_text() {
  return version_text(nccl_version());
}

OnDevice::OnDevice(int32_t device) : device_(device) {
  require(cudaGetDevice(&before_), "name the current device");
  if (device_ != before_) require(cudaSetDevice(device_), "use device " + std::to_string(device_));
}

OnDevice::~OnDevice() {
  if (device_ != before_) cudaSetDevice(before_);
}

std::shared_ptr<void> allocate_for_nccl(int64_t size_bytes) {
  void* data = nullptr;
  const auto size = static_cast<size_t>(size_bytes);
  if (ncclMemAlloc(&data, size) == ncclSuccess) {
    return {data, [](void* mine) { ncclMemFree(mine); }};
  }
  cudaGetLastError();  // of this attempt
  require(cudaMalloc(&data, size), "hold " + std::to_string(size_bytes) + " bytes");
  return {data, [](void* mine) { cudaFree(mine); }};
}

}  // namespace gradcast
