// Where the ranks of a run are, and with what: a result says nothing without that.
//
// Thread safety: any thread, but each Group one.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "bench/group.h"

namespace gradcast {

struct Place {
  std::string host;
  std::string device;                              // empty: the host's memory
  std::string libraries;                           // with their versions
  std::map<std::string, std::string> environment;  // NCCL_*
};

// Collective: every rank's, by rank.
std::vector<Place> places(Group& group);
// Lines for people: the hosts, and the environment.
std::string places_text(const std::vector<Place>& places);

}  // namespace gradcast
