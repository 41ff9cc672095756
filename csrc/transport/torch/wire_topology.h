// Which ranks share a host, and with whom a rank exchanges what in two levels.
//
// Thread safety: pure; any thread.
#pragma once

#include <algorithm>
#include <cstdint>
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
    WireTopology topology{rank, world_size, std::vector<int>(static_cast<size_t>(world_size), 0)};
    if (!host_of.empty() && host_of.size() != static_cast<size_t>(world_size)) {
      throw std::invalid_argument("hosts are given for " + std::to_string(host_of.size()) + " ranks, but there are " +
                                  std::to_string(world_size));
    }
    const auto host = [&](int each) { return host_of.empty() ? each : host_of[static_cast<size_t>(each)]; };
    for (int each = 0; each < world_size; ++each) {
      int& number = topology.local_number_of[static_cast<size_t>(each)];
      for (int before = 0; before < each; ++before)
        number += host(before) == host(each) ? 1 : 0;
    }
    const auto number = [&](int each) { return topology.local_number_of[static_cast<size_t>(each)]; };
    for (int each = 0; each < world_size; ++each) {
      if (host(each) == host(rank)) topology.locals.push_back(each);
      if (number(each) == number(rank)) topology.across.push_back(each);
    }
    const auto& counts = topology.local_number_of;
    const int largest = *std::max_element(counts.begin(), counts.end());
    for (int each = 0; each <= largest; ++each) {
      const auto holders = std::count(counts.begin(), counts.end(), each);
      if (holders * (largest + 1) != world_size) {
        throw std::invalid_argument("an exchange in two levels needs hosts with equally many ranks");
      }
    }
    return topology;
  }
};

}  // namespace gradcast
