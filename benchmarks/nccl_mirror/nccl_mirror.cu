// A stand-in for NCCL in which only wire and peers are modelled: one process has the GPU and passes for rank 0 of many,
// which all do what it does. Sums are multiplied by the number of ranks, gathers replicate. Each operation is a kernel
// on the stream that it was given to, and ends when the link of link.h would have carried it.
//
// It has the symbols that torch imports from NCCL and its soname: preloaded, torch takes it for NCCL. What it cannot do
// (messages between two ranks, premultiplied sums, windows on a device) it refuses with a sentence.
//
// Compiled for sm_80, sm_90, sm_100 and as PTX; run on an H100 with torch 2.11.
//
// Thread safety: any thread.
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime_api.h>
#include <nccl.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstdio>
#include <mutex>
#include <string>

#include "benchmarks/nccl_mirror/link.h"

struct ncclComm {
  int world_size;
  int block_count;
};

namespace nccl_mirror {
namespace {

constexpr int kThreads = 512;
constexpr int kBlocks = 16;  // of a kernel; max_ctas may ask for fewer
constexpr uint64_t kSlots = 4096;

// When an operation is over, for the blocks of its kernel.
struct Slot {
  unsigned long long number;  // of the operation
  unsigned long long end_ns;
};

// In the device's memory.
struct Wire {
  unsigned long long free_ns;
  Slot slots[kSlots];
};

// `copies` times `count` elements, one copy behind the other.
struct Job {
  const void* from;
  void* to;
  size_t count;
  int copies;
  int factor;
  uint64_t number;
  uint64_t duration_ns;
};

__device__ uint64_t now_ns() {
  uint64_t time_ns = 0;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(time_ns));
  return time_ns;
}

template <typename T>
__device__ T times(T value, int factor) {
  return value * static_cast<T>(factor);
}
template <>
__device__ __half times(__half value, int factor) {
  return __float2half(__half2float(value) * static_cast<float>(factor));
}
template <>
__device__ __nv_bfloat16 times(__nv_bfloat16 value, int factor) {
  return __float2bfloat16(__bfloat162float(value) * static_cast<float>(factor));
}

// The first block takes the link and tells the others until when. The data moves while the link is busy.
template <typename T>
__global__ void run(Job job, Wire* wire) {
  volatile Slot& slot = wire->slots[job.number % kSlots];
  if (blockIdx.x == 0 && threadIdx.x == 0) {
    slot.end_ns = take_link(now_ns(), job.duration_ns, [wire](unsigned long long expected, unsigned long long desired) {
      return atomicCAS(&wire->free_ns, expected, desired);
    });
    __threadfence();
    slot.number = job.number;
  }
  const T* from = static_cast<const T*>(job.from);
  T* to = static_cast<T*>(job.to);
  for (size_t i = blockIdx.x * blockDim.x + threadIdx.x; i < job.count; i += size_t{gridDim.x} * blockDim.x) {
    const T value = job.factor == 1 ? from[i] : times(from[i], job.factor);
    for (int copy = 0; copy < job.copies; ++copy)
      to[copy * job.count + i] = value;
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    while (slot.number != job.number)
      __nanosleep(100);
    __threadfence();
    while (now_ns() < slot.end_ns)
      __nanosleep(200);
  }
  __syncthreads();
}

std::mutex mutex;  // guards `link` and the making of `wire`
Link link = Link::of(100, 20);
Wire* wire = nullptr;
std::atomic<uint64_t> operations{0};

thread_local std::string last_error;
thread_local int open_groups = 0;
thread_local bool group_has_begun = false;

ncclResult_t refused(std::string why) {
  last_error = "the mirror of NCCL " + std::move(why);
  return ncclInvalidUsage;
}

ncclResult_t result_of(cudaError_t error) {
  if (error == cudaSuccess) return ncclSuccess;
  last_error = cudaGetErrorString(error);
  return ncclUnhandledCudaError;
}

// How much larger than this rank's numbers the result is.
ncclResult_t factor_of(ncclRedOp_t op, int world_size, int& factor) {
  if (op == ncclProd) return refused("has no products");
  factor = op == ncclSum ? world_size : 1;
  return ncclSuccess;
}

size_t bytes_of(ncclDataType_t type) {
  switch (type) {
    case ncclInt64:
    case ncclUint64:
    case ncclFloat64:
      return 8;
    case ncclInt32:
    case ncclUint32:
    case ncclFloat32:
      return 4;
    case ncclFloat16:
    case ncclBfloat16:
      return 2;
    default:
      return 1;
  }
}

template <typename T>
ncclResult_t launch(const Job& job, const ncclComm& comm, cudaStream_t stream) {
  run<T><<<comm.block_count, kThreads, 0, stream>>>(job, wire);
  return result_of(cudaGetLastError());
}

// `size`: elements of all ranks together.
ncclResult_t start(Job job, Traffic traffic, size_t size, ncclDataType_t type, const ncclComm* comm,
                   cudaStream_t stream) {
  if (size == 0) return ncclSuccess;
  {
    const std::lock_guard lock(mutex);
    const double bytes = wire_bytes(traffic, static_cast<double>(size * bytes_of(type)), comm->world_size);
    job.duration_ns = duration_ns(link, bytes, !group_has_begun);
  }
  group_has_begun = open_groups > 0;
  job.number = ++operations;
  switch (type) {
    case ncclInt8:
    case ncclUint8:
      return launch<uint8_t>(job, *comm, stream);
    case ncclInt32:
    case ncclUint32:
      return launch<uint32_t>(job, *comm, stream);
    case ncclInt64:
    case ncclUint64:
      return launch<uint64_t>(job, *comm, stream);
    case ncclFloat16:
      return launch<__half>(job, *comm, stream);
    case ncclFloat32:
      return launch<float>(job, *comm, stream);
    case ncclFloat64:
      return launch<double>(job, *comm, stream);
    case ncclBfloat16:
      return launch<__nv_bfloat16>(job, *comm, stream);
    default:
      if (job.factor != 1) return refused("has no sums of 8-bit floating-point numbers");
      return launch<uint8_t>(job, *comm, stream);
  }
}

ncclResult_t make(ncclComm_t* comm, int world_size, int rank, const ncclConfig_t* config) {
  if (rank != 0) return refused("stands for rank 0 only: start one process, with all others inside it");
  const std::lock_guard lock(mutex);
  if (wire == nullptr) {
    cudaError_t error = cudaMalloc(&wire, sizeof *wire);
    if (error == cudaSuccess) error = cudaMemset(wire, 0, sizeof *wire);
    if (error == cudaSuccess) error = cudaDeviceSynchronize();  // kernels of other streams do not wait for the memset
    if (error != cudaSuccess) return result_of(error);
    std::fprintf(stderr, "this is the mirror of NCCL: nothing is sent, and %d ranks do what this one does\n",
                 world_size);
  }
  const bool is_limited = config != nullptr && config->maxCTAs != NCCL_CONFIG_UNDEF_INT;
  *comm = new ncclComm{world_size, is_limited ? std::min(kBlocks, config->maxCTAs) : kBlocks};
  return ncclSuccess;
}

}  // namespace
}  // namespace nccl_mirror

using namespace nccl_mirror;  // for the symbols of NCCL, which are in no namespace

#define SYMBOL __attribute__((visibility("default")))

extern "C" {

// Of the mirror's own: how fast operations are that start from now on.
SYMBOL void nccl_mirror_set_link(double gbit_per_s, double latency_us) {
  const std::lock_guard lock(mutex);
  link = Link::of(gbit_per_s, latency_us);
}

SYMBOL ncclResult_t ncclGetVersion(int* version) {
  *version = NCCL_VERSION_CODE;
  return ncclSuccess;
}

SYMBOL ncclResult_t ncclGetUniqueId(ncclUniqueId* id) {
  *id = {};
  return ncclSuccess;
}

SYMBOL const char* ncclGetErrorString(ncclResult_t result) {
  switch (result) {
    case ncclSuccess:
      return "no error";
    case ncclInvalidUsage:
      return "invalid usage of the mirror of NCCL";
    case ncclUnhandledCudaError:
      return "a call of CUDA has failed in the mirror of NCCL";
    default:
      return "the mirror of NCCL has no such error";
  }
}

SYMBOL const char* ncclGetLastError(ncclComm_t) {
  return last_error.c_str();
}

// --- Communicators ---

SYMBOL ncclResult_t ncclCommInitRankConfig(ncclComm_t* comm, int world_size, ncclUniqueId, int rank,
                                           ncclConfig_t* config) {
  return make(comm, world_size, rank, config);
}

SYMBOL ncclResult_t ncclCommInitRank(ncclComm_t* comm, int world_size, ncclUniqueId, int rank) {
  return make(comm, world_size, rank, nullptr);
}

SYMBOL ncclResult_t ncclCommInitRankScalable(ncclComm_t* comm, int world_size, int rank, int, ncclUniqueId*,
                                             ncclConfig_t* config) {
  return make(comm, world_size, rank, config);
}

SYMBOL ncclResult_t ncclCommSplit(ncclComm_t, int, int, ncclComm_t*, ncclConfig_t*) {
  return refused("splits no communicators: leave device_id of init_process_group() out");
}

SYMBOL ncclResult_t ncclCommShrink(ncclComm_t, int*, int, ncclComm_t*, ncclConfig_t*, int) {
  return refused("shrinks no communicators");
}

SYMBOL ncclResult_t ncclCommInitAll(ncclComm_t*, int, const int*) {
  return refused("has one device");
}

SYMBOL ncclResult_t ncclCommFinalize(ncclComm_t) {
  return ncclSuccess;
}

SYMBOL ncclResult_t ncclCommDestroy(ncclComm_t comm) {
  delete comm;
  return ncclSuccess;
}

// Kernels end by themselves.
SYMBOL ncclResult_t ncclCommAbort(ncclComm_t comm) {
  delete comm;
  return ncclSuccess;
}

SYMBOL ncclResult_t ncclCommGetAsyncError(ncclComm_t, ncclResult_t* error) {
  *error = ncclSuccess;
  return ncclSuccess;
}

SYMBOL ncclResult_t ncclCommCount(const ncclComm_t comm, int* count) {
  *count = comm->world_size;
  return ncclSuccess;
}

SYMBOL ncclResult_t ncclCommUserRank(const ncclComm_t, int* rank) {
  *rank = 0;
  return ncclSuccess;
}

// --- Memory ---

SYMBOL ncclResult_t ncclMemAlloc(void** data, size_t size) {
  return result_of(cudaMalloc(data, size));
}

SYMBOL ncclResult_t ncclMemFree(void* data) {
  return result_of(cudaFree(data));
}

SYMBOL ncclResult_t ncclCommRegister(const ncclComm_t, void* data, size_t, void** handle) {
  *handle = data;
  return ncclSuccess;
}

SYMBOL ncclResult_t ncclCommDeregister(const ncclComm_t, void*) {
  return ncclSuccess;
}

SYMBOL ncclResult_t ncclCommWindowRegister(ncclComm_t, void*, size_t, ncclWindow_t*, int) {
  return refused("has no windows");
}

SYMBOL ncclResult_t ncclCommWindowDeregister(ncclComm_t, ncclWindow_t) {
  return ncclSuccess;
}

SYMBOL ncclResult_t ncclDevCommCreate(ncclComm_t, struct ncclDevCommRequirements const*, struct ncclDevComm*) {
  return refused("has no communicators on the device");
}

SYMBOL ncclResult_t ncclDevCommDestroy(ncclComm_t, struct ncclDevComm const*) {
  return ncclSuccess;
}

// --- Operations ---

SYMBOL ncclResult_t ncclGroupStart() {
  ++open_groups;
  return ncclSuccess;
}

SYMBOL ncclResult_t ncclGroupEnd() {
  if (--open_groups == 0) group_has_begun = false;
  return ncclSuccess;
}

SYMBOL ncclResult_t ncclGroupSimulateEnd(ncclSimInfo_t*) {
  return refused("simulates no groups");
}

SYMBOL ncclResult_t ncclAllReduce(const void* from, void* to, size_t count, ncclDataType_t type, ncclRedOp_t op,
                                  ncclComm_t comm, cudaStream_t stream) {
  int factor = 1;
  if (const ncclResult_t result = factor_of(op, comm->world_size, factor); result != ncclSuccess) return result;
  return start({from, to, count, 1, factor}, Traffic::kReduceAndGather, count, type, comm, stream);
}

SYMBOL ncclResult_t ncclReduce(const void* from, void* to, size_t count, ncclDataType_t type, ncclRedOp_t op, int,
                               ncclComm_t comm, cudaStream_t stream) {
  int factor = 1;
  if (const ncclResult_t result = factor_of(op, comm->world_size, factor); result != ncclSuccess) return result;
  return start({from, to, count, 1, factor}, Traffic::kThrough, count, type, comm, stream);
}

SYMBOL ncclResult_t ncclReduceScatter(const void* from, void* to, size_t count, ncclDataType_t type, ncclRedOp_t op,
                                      ncclComm_t comm, cudaStream_t stream) {
  int factor = 1;
  if (const ncclResult_t result = factor_of(op, comm->world_size, factor); result != ncclSuccess) return result;
  return start({from, to, count, 1, factor}, Traffic::kHalf, count * comm->world_size, type, comm, stream);
}

SYMBOL ncclResult_t ncclAllGather(const void* from, void* to, size_t count, ncclDataType_t type, ncclComm_t comm,
                                  cudaStream_t stream) {
  return start({from, to, count, comm->world_size, 1}, Traffic::kHalf, count * comm->world_size, type, comm, stream);
}

// Every rank sends rank 0 what rank 0 sends itself.
SYMBOL ncclResult_t ncclAlltoAll(const void* from, void* to, size_t count, ncclDataType_t type, ncclComm_t comm,
                                 cudaStream_t stream) {
  return ncclAllGather(from, to, count, type, comm, stream);
}

SYMBOL ncclResult_t ncclBroadcast(const void* from, void* to, size_t count, ncclDataType_t type, int, ncclComm_t comm,
                                  cudaStream_t stream) {
  return start({from, to, count, 1, 1}, Traffic::kThrough, count, type, comm, stream);
}

SYMBOL ncclResult_t ncclBcast(void* data, size_t count, ncclDataType_t type, int root, ncclComm_t comm,
                              cudaStream_t stream) {
  return ncclBroadcast(data, data, count, type, root, comm, stream);
}

SYMBOL ncclResult_t ncclSend(const void*, size_t, ncclDataType_t, int, ncclComm_t, cudaStream_t) {
  return refused("has no messages between two ranks");
}

SYMBOL ncclResult_t ncclRecv(void*, size_t, ncclDataType_t, int, ncclComm_t, cudaStream_t) {
  return refused("has no messages between two ranks");
}

SYMBOL ncclResult_t ncclRedOpCreatePreMulSum(ncclRedOp_t*, void*, ncclDataType_t, ncclScalarResidence_t, ncclComm_t) {
  return refused("has no premultiplied sums");
}

SYMBOL ncclResult_t ncclRedOpDestroy(ncclRedOp_t, ncclComm_t) {
  return ncclSuccess;
}

}  // extern "C"
