// The text of an exception, for error messages.
//
// Thread safety: pure; any thread.
#pragma once

#include <c10/util/Exception.h>

#include <exception>
#include <string>

namespace gradcast {

// The message of torch or of a backend, without the backtrace that torch adds. If a device has run out of memory, the
// text begins with what to do.
inline std::string exception_text(const std::exception_ptr& exception) {
  std::string message = "an unknown error";
  try {
    std::rethrow_exception(exception);
  } catch (const c10::OutOfMemoryError& error) {
    message = std::string("the device has no memory left for a block on its way; make the batch smaller, or leave ") +
              "Options.wire out, which needs the most (" + error.what_without_backtrace() + ")";
  } catch (const c10::Error& error) {
    message = error.what_without_backtrace();
  } catch (const std::exception& error) {
    message = error.what();
  } catch (...) {
  }
  while (!message.empty() && message.back() == '\n')
    message.pop_back();
  return message;
}

}  // namespace gradcast
