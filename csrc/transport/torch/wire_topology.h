// The ranks that share a host, and the exchanges of a rank in two levels.
//
// Thread safety: pure; any thread.
#pragma once

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <stdexcept>
#include <string>
#include <vector>

namespace gradcast {

// Ranks of one host have local numbers, counted from 0 in rank order. A rank exchanges with `locals`, inside its host,
// and with `across`, which have its local number on the other hosts. Both are in rank order and contain the rank itself.
struct WireTopology {
  int rank = 0;
  int world_size = 1;
  std::vector<int> local_number_of{};  // by rank
  std::vector<int> locals{};
  std::vector<int> across{};

  bool has_two_levels() const { return locals.size() > 1; }

  // `host_of`: by rank, the number of its host; empty for one level, in which every rank counts as a host of its own.
  // Throws std::invalid_argument unless every host holds the same number of ranks.
  static WireTopology of(int rank, int world_size, const std::vector<int>& host_of) {
    std::vector<int> hosts = host_of;
    if (hosts.empty()) {
      hosts.resize(static_cast<size_t>(world_size));
      std::iota(hosts.begin(), hosts.end(), 0);
    }
    if (hosts.size() != static_cast<size_t>(world_size)) {
      throw std::invalid_argument("hosts are given for " + std::to_string(hosts.size()) + " ranks, but there are " +
                                  std::to_string(world_size));
    }
    WireTopology topology{rank, world_size};
    for (auto host = hosts.begin(); host != hosts.end(); ++host) {
      if (std::ranges::count(hosts, *host) != std::ranges::count(hosts, hosts[0])) {
        throw std::invalid_argument("an exchange in two levels needs hosts with equally many ranks");
      }
      topology.local_number_of.push_back(static_cast<int>(std::count(hosts.begin(), host, *host)));
    }
    const auto own = static_cast<size_t>(rank);
    for (size_t each = 0; each < hosts.size(); ++each) {
      if (hosts[each] == hosts[own]) topology.locals.push_back(static_cast<int>(each));
      if (topology.local_number_of[each] == topology.local_number_of[own])
        topology.across.push_back(static_cast<int>(each));
    }
    return topology;
  }
};

}  // namespace gradcast
