// The transport over MPI where MPI fails: this binary has MPI_Test and MPI_Comm_free of its own, in front of the
// library's, and an operator delete that watches one piece of memory. One rank, so no mpirun is needed.
#include "gradcast/mpi.h"

#include <gtest/gtest.h>

#include <atomic>
#include <cstdlib>
#include <memory>
#include <new>
#include <string>
#include <vector>

#include "tests/support/recording_sink.h"

namespace {

std::atomic<bool> next_test_fails = false;
std::atomic<int> freed_communicators = 0;
std::atomic<void*> message = nullptr;  // of the last all-reduce
std::atomic<bool> message_was_freed = false;

}  // namespace

// In front of the library's, as the profiling interface of MPI allows.
extern "C" int MPI_Test(MPI_Request* request, int* flag, MPI_Status* status) {
  return next_test_fails.exchange(false) ? MPI_ERR_INTERN : PMPI_Test(request, flag, status);
}

extern "C" int MPI_Comm_free(MPI_Comm* communicator) {
  ++freed_communicators;
  return PMPI_Comm_free(communicator);
}

extern "C" int MPI_Iallreduce(const void* sent, void* received, int count, MPI_Datatype type, MPI_Op op,
                              MPI_Comm communicator, MPI_Request* request) {
  message_was_freed = false;
  message = received;
  return PMPI_Iallreduce(sent, received, count, type, op, communicator, request);
}

// Not inline: GCC would take the library's free() for that of another operator new.
[[gnu::noinline]] void* operator new(size_t size) {
  void* memory = std::malloc(size);
  if (memory == nullptr) throw std::bad_alloc();
  return memory;
}

[[gnu::noinline]] void operator delete(void* memory) noexcept {
  if (memory != nullptr && memory == message) message_was_freed = true;
  std::free(memory);
}

[[gnu::noinline]] void operator delete(void* memory, size_t) noexcept {
  operator delete(memory);
}

namespace gradcast {
namespace {

class MpiTest : public testing::Test {
 protected:
  MpiTest() : numbers_(100, 1.0F) {
    freed_communicators = 0;
    next_test_fails = false;
    message = nullptr;
    message_was_freed = false;
    transport_ = make_mpi_transport(MPI_COMM_WORLD, {{numbers_.data(), 400, Element::kFloat32}});
  }

  // Starts an all-reduce of two ranges, so that MPI works on memory of the transport's.
  std::string all_reduce() {
    transport_->start({0, Op::kAllReduce, 0, ranges_, 2});
    return sink_.end_of(0);
  }

  std::vector<float> numbers_;
  const Range ranges_[2] = {{0, 40}, {80, 400}};
  RecordingSink sink_;
  std::unique_ptr<Transport> transport_;
};

TEST_F(MpiTest, MemoryOfWhatHasEndedIsGivenBack) {
  transport_->open(&sink_);
  EXPECT_EQ(all_reduce(), "");
  transport_->close();
  EXPECT_NE(message, nullptr);
  EXPECT_TRUE(message_was_freed);
}

// And the communicator is kept: other ranks need not have met the failure.
TEST_F(MpiTest, MemoryOfAFailedTestIsNeverGivenBack) {
  transport_->open(&sink_);
  next_test_fails = true;
  const std::string error = all_reduce();
  EXPECT_NE(error.find("all_reduce of"), std::string::npos) << error;
  EXPECT_NE(message, nullptr);
  transport_->close();
  transport_.reset();
  EXPECT_FALSE(message_was_freed);
  EXPECT_EQ(freed_communicators, 0);
}

TEST_F(MpiTest, CloseFreesTheCommunicatorOnceAlsoAfterAnAbortOfNothing) {
  transport_->open(&sink_);
  EXPECT_EQ(all_reduce(), "");
  transport_->abort("the end");
  EXPECT_EQ(freed_communicators, 0);
  transport_->close();
  EXPECT_EQ(freed_communicators, 1);
  transport_.reset();
  EXPECT_EQ(freed_communicators, 1);
}

TEST_F(MpiTest, ATransportThatWasNeverOpenedFreesTheCommunicator) {
  transport_.reset();
  EXPECT_EQ(freed_communicators, 1);
}

}  // namespace
}  // namespace gradcast

int main(int argc, char** argv) {
  testing::InitGoogleTest(&argc, argv);
  // gtest_discover_tests() asks for the names alone, maybe where MPI cannot start.
  if (testing::GTEST_FLAG(list_tests)) return RUN_ALL_TESTS();
  int level = MPI_THREAD_SINGLE;
  MPI_Init_thread(&argc, &argv, MPI_THREAD_MULTIPLE, &level);
  const int status = RUN_ALL_TESTS();
  MPI_Finalize();
  return status;
}
