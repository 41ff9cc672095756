#include "gradcast/networks.h"

#include <bit>

#include "gradcast/error.h"

namespace gradcast {
namespace {

[[noreturn]] void refuse(const std::string& message) {
  throw Error(ErrorCode::kInvalidOption, message);
}

// Far beyond any network, and inside the limits of check_link.
constexpr double kLatencyNsMax = 1e12;
constexpr double kBandwidthBytesPerSMax = 1e18;

void check_hop(const std::string& place, const Hop& hop) {
  if (!(hop.latency_ns >= 0 && hop.latency_ns <= kLatencyNsMax)) {
    refuse("the latency " + place + " is " + number_text(hop.latency_ns) + " ns; it must be from 0 to 1e12");
  }
  if (!(hop.bandwidth_bytes_per_s >= 1 && hop.bandwidth_bytes_per_s <= kBandwidthBytesPerSMax)) {
    refuse("the bandwidth " + place + " is " + number_text(hop.bandwidth_bytes_per_s) +
           " bytes per second; it must be from 1 to 1e18");
  }
}

void check_count(const char* name, int32_t count) {
  if (count < 1)
    refuse("the number of " + std::string(name) + " is " + std::to_string(count) + "; it must be at least 1");
}

double ns_per_byte(const Hop& hop) {
  return 1e9 / hop.bandwidth_bytes_per_s;
}

// (P - 1)/P of the bytes leave each worker in a reduce-scatter, and as many in an all-gather.
double sent_share(int32_t count) {
  return static_cast<double>(count - 1) / static_cast<double>(count);
}

// An all-reduce that is a reduce-scatter followed by an all-gather that mirrors it.
LinkModel of_halves(double half_alpha_ns, double half_beta_ns_per_byte) {
  const OpCost half = linear_cost({half_alpha_ns, half_beta_ns_per_byte});
  LinkModel link;
  link.all_reduce = linear_cost({2 * half_alpha_ns, 2 * half_beta_ns_per_byte});
  link.reduce_scatter = half;
  link.all_gather = half;
  check_link(link);
  return link;
}

// The numbers of papers and programs: alpha in seconds, beta in seconds per byte.
struct Published {
  const char* name;
  int32_t world_size;
  double alpha_s;
  double beta_s_per_byte;
};

constexpr const char* kMgwfbp =
    "S. Shi, X. Chu, B. Li, MG-WFBP, IEEE INFOCOM 2019: constants of their distributed_optimizer.py";
// Other copies of that program multiply these start-up times by 3. With the factor, a replay of the throughput measured
// on that cluster is off by half.
constexpr const char* kDdlBenchmarks =
    "HKBU-HPML/ddl-benchmarks (S. Shi et al., arXiv:2005.13247), distributed_optimizer.py, without the factor 3";
constexpr const char* kVtrain =
    "line through the all-reduce tables of vTrain (J. Bang et al., arXiv:2312.12391), 1 to 128 MB";

constexpr const char* k10Gbe = "10 Gbit/s Ethernet, 4 GPUs per node";
constexpr const char* k56Gbib = "56 Gbit/s InfiniBand, 4 GPUs per node";
constexpr const char* kPcie = "PCIe inside one node";
constexpr const char* kV100 = "NVLink between V100 GPUs of one node, NCCL";
constexpr const char* kA100 = "NVLink between A100 GPUs of one node, NCCL";

NamedNetwork named(const Published& published, const char* summary, const char* source) {
  NamedNetwork network;
  network.name = published.name;
  network.summary = std::string(summary) + ", " + std::to_string(published.world_size) + " workers";
  network.source = source;
  network.world_size = published.world_size;
  network.link.all_reduce = linear_cost({published.alpha_s * 1e9, published.beta_s_per_byte * 1e9});
  return network;
}

std::vector<NamedNetwork> published_networks() {
  return {
      named({"10gbe-8", 8, 5.230e-4, 8.571e-10}, k10Gbe, kMgwfbp),
      named({"10gbe-16", 16, 9.081e-4, 7.396e-10}, k10Gbe, kMgwfbp),
      named({"10gbe-32", 32, 1.348e-3, 8.643e-10}, k10Gbe, kDdlBenchmarks),
      named({"10gbe-64", 64, 2.348e-3, 9.643e-10}, k10Gbe, kDdlBenchmarks),
      named({"56gbib-8", 8, 9.754e-5, 3.057e-10}, k56Gbib, kMgwfbp),
      named({"56gbib-16", 16, 2.358e-4, 4.059e-10}, k56Gbib, kMgwfbp),
      named({"56gbib-32", 32, 4.063e-4, 1.5 * 3.271e-10}, k56Gbib, kDdlBenchmarks),
      named({"56gbib-64", 64, 8.063e-4, 1.8 * 3.271e-10}, k56Gbib, kDdlBenchmarks),
      named({"pcie-2", 2, 2.555e-6, 9.838e-11}, kPcie, kMgwfbp),
      named({"pcie-4", 4, 4.204e-5, 2.059e-10}, kPcie, kMgwfbp),
      named({"nvlink-v100-2", 2, 23.6e-6, 4.435e-11}, kV100, kVtrain),
      named({"nvlink-v100-4", 4, 49.0e-6, 1.709e-11}, kV100, kVtrain),
      named({"nvlink-v100-8", 8, 84.4e-6, 1.232e-11}, kV100, kVtrain),
      named({"nvlink-a100-2", 2, 40.9e-6, 5.453e-12}, kA100, kVtrain),
      named({"nvlink-a100-4", 4, 47.2e-6, 7.283e-12}, kA100, kVtrain),
      named({"nvlink-a100-8", 8, 73.5e-6, 7.899e-12}, kA100, kVtrain),
  };
}

}  // namespace

LinkModel ring_link(const Hop& hop, int32_t worker_count) {
  check_hop("of the link", hop);
  check_count("workers", worker_count);
  return of_halves((worker_count - 1) * hop.latency_ns, sent_share(worker_count) * ns_per_byte(hop));
}

LinkModel tree_link(const Hop& hop, int32_t worker_count) {
  check_hop("of the link", hop);
  check_count("workers", worker_count);
  const int step_count = std::bit_width(static_cast<uint32_t>(worker_count - 1));  // ceil(log2 P)
  return of_halves(step_count * hop.latency_ns, sent_share(worker_count) * ns_per_byte(hop));
}

LinkModel hierarchical_link(const Hierarchy& hierarchy) {
  check_count("nodes", hierarchy.node_count);
  check_count("workers per node", hierarchy.workers_per_node);
  check_hop("inside a node", hierarchy.intra_node);
  check_hop("between nodes", hierarchy.inter_node);
  const double alpha_ns = (hierarchy.workers_per_node - 1) * hierarchy.intra_node.latency_ns +
                          (hierarchy.node_count - 1) * hierarchy.inter_node.latency_ns;
  // Each worker's ring carries 1/g of the bytes over 1/g of the node's connection.
  const double beta_ns_per_byte = sent_share(hierarchy.workers_per_node) * ns_per_byte(hierarchy.intra_node) +
                                  sent_share(hierarchy.node_count) * ns_per_byte(hierarchy.inter_node);
  return of_halves(alpha_ns, beta_ns_per_byte);
}

const std::vector<NamedNetwork>& networks() {
  static const std::vector<NamedNetwork> all = published_networks();
  return all;
}

const NamedNetwork& network(std::string_view name) {
  std::string known;
  for (const NamedNetwork& candidate : networks()) {
    if (candidate.name == name) return candidate;
    known += (known.empty() ? "" : ", ") + candidate.name;
  }
  refuse("the network '" + std::string(name) + "' is unknown; use one of " + known);
}

}  // namespace gradcast
