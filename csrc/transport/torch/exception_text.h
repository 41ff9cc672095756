// What has gone wrong, for people.
//
// Thread safety: pure; any thread.
#pragma once

#include <exception>
#include <string>

namespace gradcast {

// torch's or a backend's own words, without the list of addresses that torch adds to them; where a device has no memory left,
// what to do comes first.
std::string message_of(const std::exception_ptr& exception);

}  // namespace gradcast
