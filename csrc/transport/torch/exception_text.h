// The text of an exception, for error messages.
//
// Thread safety: pure; any thread.
#pragma once

#include <exception>
#include <string>

namespace gradcast {

// The message of torch or of a backend, without the backtrace that torch adds. If a device has run out of memory, the
// text begins with what to do.
std::string exception_text(const std::exception_ptr& exception);

}  // namespace gradcast
