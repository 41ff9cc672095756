#include "gradcast/error.h"
#include "group.h"
#ifdef GRADCAST_HAS_MPI
#include <mpi.h>

#include <cstdio>
#include <exception>
#include <utility>

#include "gradcast/mpi.h"
#endif

namespace gradcast {

#ifdef GRADCAST_HAS_MPI
namespace {

class MpiGroup final : public Group {
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

  std::vector<std::vector<double>> gather(const std::vector<double>& own) override {
    const int count = static_cast<int>(own.size());
    std::vector<double> all(own.size() * static_cast<size_t>(world_size_));
    if (own.empty()) {
      MPI_Barrier(MPI_COMM_WORLD);
    } else {
      MPI_Allgather(own.data(), count, MPI_DOUBLE, all.data(), count, MPI_DOUBLE, MPI_COMM_WORLD);
    }
    std::vector<std::vector<double>> numbers;
    for (int rank = 0; rank < world_size_; ++rank) {
      numbers.emplace_back(all.begin() + rank * count, all.begin() + (rank + 1) * count);
    }
    return numbers;
  }

  std::string from_first(const std::string& text) override {
    uint64_t size = text.size();
    MPI_Bcast(&size, 1, MPI_UINT64_T, 0, MPI_COMM_WORLD);
    std::string copy = text;
    copy.resize(size);
    MPI_Bcast(copy.data(), static_cast<int>(size), MPI_CHAR, 0, MPI_COMM_WORLD);
    return copy;
  }

 private:
  int rank_ = 0;
  int world_size_ = 1;
};

}  // namespace

void run_under_mpi(const std::function<void(Group&)>& action) {
  int level = MPI_THREAD_SINGLE;
  MPI_Init_thread(nullptr, nullptr, MPI_THREAD_MULTIPLE, &level);
  try {
    MpiGroup group;
    action(group);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "gradcast-bench: %s\n", error.what());
    MPI_Abort(MPI_COMM_WORLD, 1);
  }
  MPI_Finalize();
}
#else
void run_under_mpi(const std::function<void(Group&)>&) {
  throw Error(
      ErrorCode::kInvalidOption,
      "this gradcast-bench was built without MPI; install one (libopenmpi-dev on Debian and Ubuntu) and build again, "
      "or use --transport inproc");
}
#endif

}  // namespace gradcast
