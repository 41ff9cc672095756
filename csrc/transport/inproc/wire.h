// The wire of an in-process world: one thread that carries out the operations, and the state it shares with the ranks'
// transports.
//
// The k-th operation of each rank is matched with the k-th of all others. It runs when all ranks have started it and
// the emulated network has had its time; sums and completions run on the wire's thread.
//
// Thread safety: any thread.
#pragma once

#include <cstdint>
#include <deque>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "gradcast/inproc.h"
#include "gradcast/transport.h"
#include "platform/sync.h"
#include "transport/inproc/collective.h"

namespace gradcast {

class InprocWorld::Wire {
 public:
  Wire(int32_t world_size, const InprocCost& cost);
  ~Wire();

  int32_t world_size() const { return world_size_; }
  void admit(int32_t rank, std::vector<HostBuffer> buffers) GC_EXCLUDES(mutex_);

  // As in Transport, for one rank.
  void open(int32_t rank, CompletionSink* sink) GC_EXCLUDES(mutex_);
  void start(int32_t rank, const Operation& operation) GC_EXCLUDES(mutex_);
  void abort(int32_t rank, const std::string& reason) GC_EXCLUDES(mutex_);
  void close(int32_t rank) GC_EXCLUDES(mutex_);
  // Abort and close in one, for a transport that is destroyed in the middle of its work.
  void dismiss(int32_t rank) GC_EXCLUDES(mutex_);

 private:
  // An operation as one rank started it.
  struct Started {
    Operation operation;
    int64_t start_ns = 0;
    std::optional<std::string> fault;  // why it cannot begin
    bool completed = false;
  };
  struct Member {
    std::vector<HostBuffer> buffers;
    bool admitted = false;
    CompletionSink* sink = nullptr;
    std::deque<Started> started;      // those from number first_index_ on
    std::optional<std::string> left;  // why this rank is gone
    int32_t delivery_count = 0;       // calls of the sink that are due or running
  };
  struct Delivery {
    int32_t rank;
    int64_t ticket;
    std::optional<std::string> error;
  };

  void run() GC_EXCLUDES(mutex_);
  std::vector<Delivery> failures_due() GC_REQUIRES(mutex_);
  std::optional<std::string> failure_of(int32_t rank, const Started& started) const GC_REQUIRES(mutex_);
  // When the first operation ends; nothing before all ranks have started it.
  std::optional<int64_t> first_finish_ns() const GC_REQUIRES(mutex_);
  // How the ranks' first operations differ. REQUIRES: all ranks have started theirs.
  std::optional<std::string> first_mismatch() const GC_REQUIRES(mutex_);
  std::vector<Delivery> pop_first(const std::optional<std::string>& error) GC_REQUIRES(mutex_);
  std::vector<Contribution> first_contributions() const GC_REQUIRES(mutex_);
  // These two give the mutex up in between: start() must not wait for sums or for a sink.
  void run_first() GC_REQUIRES(mutex_);
  void deliver(const std::vector<Delivery>& deliveries) GC_REQUIRES(mutex_);
  void check_rank(int32_t rank) const;

  // Constant after construction.
  const int32_t world_size_;
  const InprocCost cost_;

  Mutex mutex_;
  CondVar changed_;                                    // for the wire's thread
  CondVar delivered_;                                  // for transports that close
  std::vector<Member> members_ GC_GUARDED_BY(mutex_);  // by rank
  int64_t first_index_ GC_GUARDED_BY(mutex_) = 0;      // of the operation that the wire takes next
  int64_t free_ns_ GC_GUARDED_BY(mutex_) = 0;          // when the wire is done with the one before
  bool stopping_ GC_GUARDED_BY(mutex_) = false;

  std::thread thread_;
};

}  // namespace gradcast
