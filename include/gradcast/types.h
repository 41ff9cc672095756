// Words that every part of gradcast shares: the kinds of collective operation, ranges of bytes, the two modes of running
// a plan; and numbers as people read them.
//
// Units everywhere: times are double nanoseconds (suffix `_ns`) inside the library and whole nanoseconds in JSON; sizes
// are int64 bytes (suffix `_bytes`); rates are nanoseconds per byte (suffix `_ns_per_byte`).
//
// Thread safety: pure; any thread.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>

namespace gradcast {

// Every size in a profile, and their sum, stays at or below 2^53: above it a JSON number (an IEEE double for most
// readers) no longer names each byte.
inline constexpr int64_t kBytesMax = int64_t{1} << 53;

// Times above 2^53 ns (104 days) are refused: they are never meant, and JSON no longer holds each of them.
inline constexpr double kTimeMaxNs = static_cast<double>(kBytesMax);

// Buffers are one per data type and device; far fewer than this in any model.
inline constexpr int32_t kBufferCountMax = 1024;

// The operation of a block on its bytes. A byte is finished by one all-reduce, or by a reduce-scatter and a later
// all-gather.
enum class Op { kAllReduce, kReduceScatter, kAllGather };
inline constexpr Op kOps[] = {Op::kAllReduce, Op::kReduceScatter, Op::kAllGather};

// kOverlap: forward starts when backward ends and waits for each parameter where it reads it. kHook: forward starts
// when all gradients have arrived, as DDP does; no read ever waits.
enum class Mode { kOverlap, kHook };

// The progress of a tensor in this iteration. kQueued: a device will deliver it without the host
// (CompletionSink::queued).
enum class Progress : uint8_t { kTravelling, kQueued, kArrived };

// Bytes [lo_bytes, hi_bytes) of one gradient buffer.
struct Range {
  int64_t lo_bytes = 0;
  int64_t hi_bytes = 0;

  int64_t size_bytes() const { return hi_bytes - lo_bytes; }
  bool operator==(const Range&) const = default;
};

// The bytes of all ranges.
inline int64_t size_bytes(std::span<const Range> ranges) {
  int64_t size_bytes = 0;
  for (const Range& range : ranges) {
    size_bytes += range.size_bytes();
  }
  return size_bytes;
}

// The names used in JSON and on the command line: "all_reduce", "reduce_scatter", "all_gather"; "overlap", "hook".
// to_string(Op) is defined here for transports, which do not link the core.
constexpr std::string_view to_string(Op op) {
  return op == Op::kAllReduce ? "all_reduce" : op == Op::kReduceScatter ? "reduce_scatter" : "all_gather";
}
std::string_view to_string(Mode mode);
// Throw Error{kInvalidOption} for any other word.
Op op_from_string(std::string_view name);
Mode mode_from_string(std::string_view name);

// A size in decimal units: "37.6 kB".
std::string bytes_text(int64_t size_bytes);
// At most ten digits; the limit of sizes and times by its name, "2^53".
std::string number_text(double value);

}  // namespace gradcast
