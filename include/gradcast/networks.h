// Link models without a measurement: derived from one hop's latency and bandwidth, or published for a real network.
//
// A formula says what an algorithm costs where nothing else uses the network and no host is busy; a measured cost
// (link_fit.h) is what training meets. docs/reference/networks.md has the table of the published ones.
//
// Thread safety: pure; any thread.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "gradcast/link.h"

namespace gradcast {

// One connection, full duplex: a message of x bytes takes latency + x / bandwidth.
struct Hop {
  double latency_ns = 0;
  double bandwidth_bytes_per_s = 0;
};

// The formulas below give all three kinds of operation. A reduce-scatter and an all-gather of x bytes (the whole array,
// not a worker's share) each cost half of an all-reduce, which they make up together. One worker: every cost is 0. They
// throw Error{kInvalidOption} for a latency or bandwidth that is no such thing, and fewer than one worker.

// Each worker sends to its neighbour only, in 2 (P - 1) steps of 1/P of the bytes:
//   all-reduce = 2 (P - 1) latency + 2 (P - 1)/P bytes/bandwidth.
// No algorithm moves fewer bytes per worker; the price is a latency that grows with P. P. Patarasuk and X. Yuan,
// "Bandwidth optimal all-reduce algorithms for clusters of workstations", J. Parallel Distrib. Comput. 69 (2009); R.
// Thakur, R. Rabenseifner, W. Gropp, "Optimization of collective communication operations in MPICH", IJHPCA 19 (2005).
LinkModel ring_link(const Hop& hop, int32_t worker_count);

// Recursive halving, then recursive doubling, in 2 ceil(log2 P) steps:
//   all-reduce = 2 ceil(log2 P) latency + 2 (P - 1)/P bytes/bandwidth.
// Thakur, Rabenseifner, Gropp (2005) for powers of two; J. L. Träff, "Optimal, non-pipelined reduce-scatter and
// allreduce algorithms", arXiv:2410.14234 (2024), reaches the same for every P. Needs a network in which distant
// workers talk as fast as neighbours. Taken in place of pipelined double binary trees (P. Sanders, J. Speck, J. L.
// Träff, "Two-tree algorithms for full bandwidth broadcast, reduction and scan", Parallel Computing 35 (2009);
// NCCL 2.4), because those have neither a reduce-scatter nor an all-gather and a cost with the square root of the size
// in it; logarithmic latency at full bandwidth, what matters to a plan, is common to both.
LinkModel tree_link(const Hop& hop, int32_t worker_count);

struct Hierarchy {
  Hop intra_node;  // between two workers of one node
  Hop inter_node;  // a node's whole connection, which its workers share
  int32_t node_count = 1;
  int32_t workers_per_node = 1;
};
// A reduce-scatter in each node, an all-reduce between the nodes by workers_per_node rings at once, each on its share
// of the bytes, and an all-gather in each node; g workers in each of M nodes:
//   all-reduce = 2 (g - 1) latency_intra + 2 (g - 1)/g bytes/bandwidth_intra
//              + 2 (M - 1) latency_inter + 2 (M - 1)/M bytes/bandwidth_inter.
// M. Cho, U. Finkler, D. Kung, H. Hunter, "BlueConnect: decomposing all-reduce for deep learning on heterogeneous
// network hierarchy", MLSys 2019, with two levels. With one worker per node, or one node, it is a ring.
LinkModel hierarchical_link(const Hierarchy& hierarchy);

// A published cost of a real network. Where only that of an all-reduce was published, which is true of all so far, the
// link has no reduce_scatter and no all_gather: policies that need them refuse it.
struct NamedNetwork {
  std::string name;     // network and world size: "10gbe-8"
  std::string summary;  // one line for people
  std::string source;
  int32_t world_size = 1;
  LinkModel link;
};

// Every bundled network, by kind and then world size.
const std::vector<NamedNetwork>& networks();

// Throws Error{kInvalidOption} that lists the known names.
const NamedNetwork& network(std::string_view name);

}  // namespace gradcast
