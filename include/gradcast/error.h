// The one exception of gradcast, and the check that guards its invariants.
//
// The message is a sentence for the user: what is wrong (with the field), and what to do. It never carries C++
// internals, except for kInternal, which is a defect of gradcast itself.
//
// Thread safety: pure; any thread.
#pragma once

#include <stdexcept>
#include <string>
#include <string_view>

namespace gradcast {

enum class ErrorCode {
  kInvalidProfile,  // a profile, or a file that should hold one
  kInvalidPlan,     // a plan, or a plan that belongs to another profile
  kInvalidLink,     // a link model, or a kind of operation that it does not know
  kInvalidOption,   // a policy name, a parameter, a mode
  kInvalidUse,      // training code that gradcast cannot follow without giving wrong numbers
  kCommunication,   // an operation on the network failed, or a peer is gone
  kInternal,        // a broken invariant: please report
};

// "invalid_profile", "invalid_plan", "invalid_link", "invalid_option", "invalid_use", "communication", "internal".
std::string_view to_string(ErrorCode code);

class Error : public std::runtime_error {
 public:
  Error(ErrorCode code, const std::string& message) : std::runtime_error(message), code_(code) {}
  ErrorCode code() const { return code_; }

 private:
  ErrorCode code_;
};

namespace detail {
[[noreturn]] void check_failed(const char* condition, const char* file, int line);
}  // namespace detail

}  // namespace gradcast

// A broken invariant throws Error{kInternal} with the condition and its place; compiled into every build.
#define GC_CHECK(condition)                                                             \
  do {                                                                                  \
    if (!(condition)) ::gradcast::detail::check_failed(#condition, __FILE__, __LINE__); \
  } while (false)
