#include "bench/group.h"
#include "gradcast/error.h"
#ifdef GRADCAST_HAS_MPI
#include <mpi.h>

#include <cstdio>
#include <exception>
#include <numeric>
#include <utility>

#include "gradcast/mpi.h"
#endif
#ifdef GRADCAST_HAS_NCCL
#include <cuda_runtime_api.h>

#include "cuda/spin.h"
#include "gradcast/nccl.h"
#include "platform/clock.h"
#endif

namespace gradcast {

#ifdef GRADCAST_HAS_MPI
namespace {

class MpiGroup : public Group {
 public:
  MpiGroup() {
    MPI_Comm_rank(MPI_COMM_WORLD, &rank_);
    MPI_Comm_size(MPI_COMM_WORLD, &world_size_);
  }

  int32_t rank() const override { return rank_; }
  int32_t world_size() const override { return world_size_; }

  std::unique_ptr<Transport> make_transport(std::vector<HostBuffer> buffers) override {
    return make_mpi_transport(MPI_COMM_WORLD, std::move(buffers));
  }

  std::string libraries() const override {
    char text[MPI_MAX_LIBRARY_VERSION_STRING] = "";
    int length = 0;
    MPI_Get_library_version(text, &length);
    return std::string(text).substr(0, std::string(text).find_first_of(",\n"));  // then comes how it was built
  }

  std::vector<std::string> gather_texts(const std::string& own) override {
    const int size = static_cast<int>(own.size());
    std::vector<int> sizes(static_cast<size_t>(world_size_));
    MPI_Allgather(&size, 1, MPI_INT, sizes.data(), 1, MPI_INT, MPI_COMM_WORLD);
    std::vector<int> offsets(sizes.size());
    std::exclusive_scan(sizes.begin(), sizes.end(), offsets.begin(), 0);
    std::string all(static_cast<size_t>(offsets.back() + sizes.back()), '\0');
    MPI_Allgatherv(own.data(), size, MPI_CHAR, all.data(), sizes.data(), offsets.data(), MPI_CHAR, MPI_COMM_WORLD);
    std::vector<std::string> texts;
    for (size_t rank = 0; rank < sizes.size(); ++rank) {
      texts.push_back(all.substr(static_cast<size_t>(offsets[rank]), static_cast<size_t>(sizes[rank])));
    }
    return texts;
  }

 private:
  int rank_ = 0;
  int world_size_ = 1;
};

#ifdef GRADCAST_HAS_NCCL
void require(cudaError_t error, const char* action) {
  if (error != cudaSuccess) {
    throw Error(ErrorCode::kCommunication, std::string("CUDA could not ") + action + ": " + cudaGetErrorString(error));
  }
}

std::string cuda_version_text(int version) {
  return std::to_string(version / 1000) + "." + std::to_string(version / 10 % 100);
}

class NcclGroup final : public MpiGroup {
 public:
  NcclGroup() {
    int device_count = 0;
    const int32_t place = place_on_host();
    if (cudaGetDeviceCount(&device_count) != cudaSuccess || (device_count != 1 && place >= device_count)) {
      throw Error(ErrorCode::kInvalidUse, "this host has " + std::to_string(device_count) +
                                              " CUDA devices and a rank that would take number " +
                                              std::to_string(place) +
                                              "; start one rank per device, or use "
                                              "--transport mpi");
    }
    // Slurm shows each rank its own one alone; where two share it after all, NCCL refuses.
    device_ = device_count == 1 ? 0 : place;
    require(cudaSetDevice(device_), "use the device");
    require(cudaStreamCreateWithFlags(&compute_, cudaStreamNonBlocking), "make a stream");
  }
  ~NcclGroup() override { cudaStreamDestroy(compute_); }

  std::string libraries() const override {
    int runtime = 0;
    int driver = 0;
    require(cudaRuntimeGetVersion(&runtime), "say its version");
    require(cudaDriverGetVersion(&driver), "say the driver's version");
    return MpiGroup::libraries() + ", NCCL " + nccl_version_text() + ", CUDA " + cuda_version_text(runtime) +
           ", driver for CUDA " + cuda_version_text(driver);
  }
  std::string device() const override {
    cudaDeviceProp properties{};
    require(cudaGetDeviceProperties(&properties, device_), "describe the device");
    return properties.name;
  }

  std::shared_ptr<void> allocate(int64_t size_bytes) override {
    std::shared_ptr<void> memory = allocate_for_nccl(size_bytes);
    require(cudaMemset(memory.get(), 0, static_cast<size_t>(size_bytes)), "clear memory");
    require(cudaStreamSynchronize(nullptr), "clear memory");
    return memory;
  }
  void copy(void* to, const void* from, int64_t size_bytes) override {
    require(cudaMemcpy(to, from, static_cast<size_t>(size_bytes), cudaMemcpyDefault), "copy memory");
    // The host may go on before the device has the bytes, and the transport's stream waits for no other one.
    require(cudaStreamSynchronize(nullptr), "copy memory");
  }
  void compute_until(int64_t time_ns) override {
    const int64_t left_ns = time_ns - steady_now_ns();
    if (left_ns > 0) {
      require(spin(left_ns, compute_), "compute");
      require(cudaStreamSynchronize(compute_), "compute");
    }
  }
  // NCCL reduces each range where it lies. Only halves of an all-reduce are packed, by copies on the device.
  double pack_ns_per_byte() override { return 0; }
  std::unique_ptr<Transport> make_transport(std::vector<HostBuffer> buffers) override {
    const std::string id = from_first(rank() == 0 ? new_nccl_id() : "");
    return make_nccl_transport(
        id, rank(), world_size(), std::move(buffers),
        {.device = device_, .on_stream_time = [this](int64_t time_ns) { stream_ns_ = time_ns; }});
  }
  std::optional<double> stream_ns() const override { return static_cast<double>(stream_ns_); }

 private:
  static int32_t place_on_host() {
    MPI_Comm host = MPI_COMM_NULL;
    int place = 0;
    MPI_Comm_split_type(MPI_COMM_WORLD, MPI_COMM_TYPE_SHARED, 0, MPI_INFO_NULL, &host);
    MPI_Comm_rank(host, &place);
    MPI_Comm_free(&host);
    return place;
  }

  int32_t device_ = 0;
  int64_t stream_ns_ = 0;  // set by the transport's thread before a completion, read behind it
  cudaStream_t compute_ = nullptr;
};

std::unique_ptr<Group> make_nccl_group() {
  return std::make_unique<NcclGroup>();
}
#else
std::unique_ptr<Group> make_nccl_group() {
  throw Error(ErrorCode::kInvalidOption, "this gradcast-bench was built without NCCL; gradcast-bench --parts says why");
}
#endif

}  // namespace

void run_under_mpi(Carrier carrier, const std::function<void(Group&)>& action) {
  int level = MPI_THREAD_SINGLE;
  MPI_Init_thread(nullptr, nullptr, MPI_THREAD_MULTIPLE, &level);
  try {
    const std::unique_ptr<Group> group = carrier == Carrier::kMpi ? std::make_unique<MpiGroup>() : make_nccl_group();
    action(*group);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "gradcast-bench: %s\n", error.what());
    MPI_Abort(MPI_COMM_WORLD, 1);
  }
  MPI_Finalize();
}
#else
void run_under_mpi(Carrier, const std::function<void(Group&)>&) {
  throw Error(
      ErrorCode::kInvalidOption,
      "this gradcast-bench was built without MPI; install one (libopenmpi-dev on Debian and Ubuntu) and build again, "
      "or use --transport inproc");
}
#endif

}  // namespace gradcast
