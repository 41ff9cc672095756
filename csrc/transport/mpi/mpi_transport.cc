// The transport over MPI. start() only queues an operation; the thread hands it to MPI, polls, and unpacks. MPI never
// lets go of the memory of an operation that has not ended, so after a failure or an abort that memory is leaked on
// purpose.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <limits>
#include <string>
#include <thread>
#include <utility>

#include "gradcast/error.h"
#include "gradcast/mpi.h"
#include "platform/thread.h"
#include "transport/common/host_memory.h"
#include "transport/common/numbers.h"
#include "transport/common/parts.h"
#include "transport/common/queued_transport.h"

namespace gradcast {
namespace {

// MPI makes progress only inside its calls, so the thread polls while operations are under way. The first polls follow
// each other without a pause, because most operations end soon. Later polls pause, unless another operation is started.
constexpr int kEagerPolls = 200;
constexpr int64_t kPauseNs = 20'000;

std::string words_of(int code) {
  char text[MPI_MAX_ERROR_STRING] = "";
  int length = 0;
  MPI_Error_string(code, text, &length);
  return text;
}

void require(int code, const char* action) {
  if (code != MPI_SUCCESS) {
    throw Error(ErrorCode::kCommunication, std::string("MPI could not ") + action + ": " + words_of(code));
  }
}

void require_threads() {
  int initialized = 0;
  int finalized = 0;
  MPI_Initialized(&initialized);
  MPI_Finalized(&finalized);
  if (initialized == 0 || finalized != 0) {
    throw Error(ErrorCode::kInvalidUse,
                finalized != 0 ? "MPI has been finalized; make transports before MPI_Finalize"
                               : "MPI is not initialized; call MPI_Init_thread with MPI_THREAD_MULTIPLE first");
  }
  int level = MPI_THREAD_SINGLE;
  MPI_Query_thread(&level);
  if (level < MPI_THREAD_MULTIPLE) {
    throw Error(
        ErrorCode::kInvalidUse,
        "MPI runs without MPI_THREAD_MULTIPLE, which gradcast's thread needs beside the program's own; ask for it "
        "with MPI_Init_thread, or use an MPI library that was built with it");
  }
}

// MPI has no bfloat16: as whole numbers of its size, with a sum of our own, it is sent like any other type.
MPI_Datatype type_of(Element element) {
  return element == Element::kBFloat16 ? MPI_UINT16_T : element == Element::kFloat32 ? MPI_FLOAT : MPI_DOUBLE;
}

void add_bfloat16(void* from, void* to, int* count, MPI_Datatype*) {
  auto* const sums = static_cast<BFloat16*>(to);
  std::transform(sums, sums + *count, static_cast<const BFloat16*>(from), sums, std::plus<>());
}

class MpiTransport final : public QueuedTransport {
 public:
  MpiTransport(MPI_Comm communicator, std::vector<HostBuffer> buffers);
  ~MpiTransport() override { end(); }

 private:
  // An operation under way. MPI uses its memory until it has ended, so a flight never moves.
  struct Flight {
    Operation operation;
    std::vector<Range> ranges;         // the operation's
    std::vector<std::byte> message;    // several ranges, packed; empty for one, which MPI sends from where it lies
    std::vector<std::byte> part;       // this rank's part of a reduce-scatter
    std::vector<int> counts, offsets;  // elements of each rank's part, and where it begins
    MPI_Request request = MPI_REQUEST_NULL;
  };

  void run() override;
  void release() noexcept override;
  void launch(const Started& started);
  int post(Flight& flight, const void* source, void* numbers, int64_t element_count);
  bool has_ended(std::unique_ptr<Flight>& flight);
  void deliver(Flight& flight);

  MPI_Comm communicator_ = MPI_COMM_NULL;
  MPI_Op bfloat16_sum_ = MPI_OP_NULL;
  std::vector<std::unique_ptr<Flight>> flights_;  // the thread's own
};

MpiTransport::MpiTransport(MPI_Comm communicator, std::vector<HostBuffer> buffers)
    : QueuedTransport(std::move(buffers), "MPI") {
  require_threads();
  require(MPI_Comm_dup(communicator, &communicator_), "make a communicator for the transport");
  // By default an MPI error ends all processes, and the user would not see our message.
  MPI_Comm_set_errhandler(communicator_, MPI_ERRORS_RETURN);
  require(MPI_Op_create(&add_bfloat16, 1, &bfloat16_sum_), "make a sum of its own");
  MPI_Comm_rank(communicator_, &rank_);
  MPI_Comm_size(communicator_, &world_size_);
}

// Freeing is collective, so every rank must get here. After a failure that is not sure: another rank may not have
// failed.
void MpiTransport::release() noexcept {
  if (communicator_ == MPI_COMM_NULL || gate_.has_failed()) {
    return;
  }
  int finalized = 0;
  MPI_Finalized(&finalized);
  if (finalized == 0) {
    MPI_Comm_free(&communicator_);
    MPI_Op_free(&bfloat16_sum_);
  }
}

void MpiTransport::run() {
  name_this_thread("gradcast-mpi");
  int eager_polls = 0;
  while (true) {
    const int64_t deadline_ns = flights_.empty() ? kNever : eager_polls >= kEagerPolls ? steady_now_ns() + kPauseNs : 0;
    const auto started = wait(deadline_ns);
    if (is_closing() || gate_.aborted()) {
      break;
    }
    for (const Started& each : started) {
      try {
        launch(each);
      } catch (const std::exception& error) {  // no memory for the message
        gate_.complete(each.operation.ticket, what_failed(each.operation, error.what()).c_str());
      }
    }
    const size_t before_count = flights_.size();
    std::erase_if(flights_, [this](auto& flight) { return has_ended(flight); });
    if (!started.empty() || flights_.size() < before_count) {
      eager_polls = 0;
    } else {
      ++eager_polls;
      std::this_thread::yield();  // the rank that this one waits for may need the same core
    }
  }
  // MPI may still use the memory of operations that have not ended, so it is leaked.
  for (auto& flight : flights_) {
    static_cast<void>(flight.release());
  }
  flights_.clear();
}

void MpiTransport::launch(const Started& started) {
  auto flight = std::make_unique<Flight>();
  flight->ranges = started.ranges;
  flight->operation = started.operation;
  flight->operation.ranges = flight->ranges.data();
  const Operation& operation = flight->operation;
  const HostBuffer& buffer = buffers_[operation.buffer];
  const int64_t message_bytes = size_bytes(operation);
  const int64_t element_count = message_bytes / element_bytes(buffer.element);
  if (element_count > std::numeric_limits<int>::max()) {
    gate_.complete(operation.ticket,
                   "a block of more than 2,147,483,647 elements is too large for MPI; give the policy a smaller limit");
    return;
  }
  void* numbers = static_cast<char*>(buffer.data) + operation.ranges[0].lo_bytes;
  const void* source = source_of(buffer) + operation.ranges[0].lo_bytes;
  if (operation.range_count > 1) {
    flight->message.resize(static_cast<size_t>(message_bytes));
    numbers = flight->message.data();
    source = numbers;
    pack(numbers, buffer, ranges_of(operation));
  }
  const int code = post(*flight, source, numbers, element_count);
  if (code != MPI_SUCCESS) {
    gate_.complete(operation.ticket, what_failed(operation, words_of(code)).c_str());
    return;
  }
  flights_.push_back(std::move(flight));
}

// Starts the collective. Returns MPI's error code.
int MpiTransport::post(Flight& flight, const void* source, void* numbers, int64_t element_count) {
  const Element element = buffers_[flight.operation.buffer].element;
  const MPI_Datatype type = type_of(element);
  const MPI_Op sum = element == Element::kBFloat16 ? bfloat16_sum_ : MPI_SUM;
  const bool is_in_place = source == numbers;
  for (int32_t rank = 0; rank < world_size_; ++rank) {
    const Part part = part_of(rank, world_size_, element_count);
    flight.counts.push_back(static_cast<int>(part.count()));
    flight.offsets.push_back(static_cast<int>(part.first));
  }
  switch (flight.operation.op) {
    case Op::kAllReduce:
      return MPI_Iallreduce(is_in_place ? MPI_IN_PLACE : source, numbers, static_cast<int>(element_count), type, sum,
                            communicator_, &flight.request);
    case Op::kReduceScatter:
      // Not in place: MPI would put the part at the beginning of the block instead of where it belongs.
      flight.part.resize(static_cast<size_t>(flight.counts[rank_] * element_bytes(element)) + 1);
      return MPI_Ireduce_scatter(source, flight.part.data(), flight.counts.data(), type, sum, communicator_,
                                 &flight.request);
    case Op::kAllGather:
      return MPI_Iallgatherv(is_in_place
                                 ? MPI_IN_PLACE
                                 : static_cast<const char*>(source) + flight.offsets[rank_] * element_bytes(element),
                             flight.counts[rank_], type, numbers, flight.counts.data(), flight.offsets.data(), type,
                             communicator_, &flight.request);
  }
  return MPI_ERR_OP;
}

// Asks MPI about one operation, which also lets MPI make progress, and completes it if it has ended.
bool MpiTransport::has_ended(std::unique_ptr<Flight>& flight) {
  int ended = 0;
  const int code = MPI_Test(&flight->request, &ended, MPI_STATUS_IGNORE);
  if (code != MPI_SUCCESS) {
    gate_.complete(flight->operation.ticket, what_failed(flight->operation, words_of(code)).c_str());
    static_cast<void>(flight.release());  // MPI may still use the memory, which is leaked
    return true;
  }
  if (ended != 0) {
    deliver(*flight);
    gate_.complete(flight->operation.ticket, nullptr);
  }
  return ended != 0;
}

// Copies the result to where it belongs: a packed message back into its ranges, and a reduce-scatter's part to its
// place.
void MpiTransport::deliver(Flight& flight) {
  const Operation& operation = flight.operation;
  const HostBuffer& buffer = buffers_[operation.buffer];
  const int64_t own_offset_bytes = flight.offsets[rank_] * element_bytes(buffer.element);
  const int64_t own_bytes = flight.counts[rank_] * element_bytes(buffer.element);
  if (operation.op == Op::kReduceScatter) {
    auto* const message = flight.message.empty() ? static_cast<std::byte*>(buffer.data) + operation.ranges[0].lo_bytes
                                                 : flight.message.data();
    std::copy_n(flight.part.begin(), own_bytes, message + own_offset_bytes);
  }
  if (!flight.message.empty()) {
    unpack(buffer, ranges_of(operation), flight.message.data());
  }
}

}  // namespace

std::unique_ptr<Transport> make_mpi_transport(MPI_Comm communicator, std::vector<HostBuffer> buffers) {
  return std::make_unique<MpiTransport>(communicator, std::move(buffers));
}

}  // namespace gradcast
