// The published policies with their parameters.
#include "policies/policy_entry.h"
#include "policies/published.h"

namespace gradcast {

std::vector<PolicyEntry> published_policies() {
  return {
      policy_entry({.name = "fifo",
                    .summary = "one operation per tensor in the order of readiness (WFBP)",
                    .source = "Poseidon, USENIX ATC 2017"},
                   &fifo),
      policy_entry({.name = "mgwfbp",
                    .summary = "neighbours in ready order merged where the model says that it saves time",
                    .source = "MG-WFBP, INFOCOM 2019"},
                   &mgwfbp),
      policy_entry({.name = "p3", .summary = "small slices, the most urgent one first", .source = "P3, MLSys 2019"},
                   &p3,
                   {parameter(&P3Options::slice_elements, "slice_elements", 1, kSizeMax, "largest slice of a tensor")}),
      policy_entry(
          {.name = "bytescheduler",
           .summary = "chunks by priority, a credit of bytes handed to the link ahead; both sizes tuned",
           .source = "ByteScheduler, SOSP 2019"},
          &bytescheduler,
          {parameter(&ByteschedulerOptions::partition_bytes, "partition_bytes", 0, kSizeMax, "largest chunk; 0: tuned"),
           parameter(&ByteschedulerOptions::credit_bytes, "credit_bytes", 0, kSizeMax,
                     "bytes whose order is fixed ahead of the link; 0: tuned")}),
      policy_entry(
          {.name = "ddp",
           .summary = "PyTorch DDP's buckets of whole tensors in the order of readiness",
           .source = "PyTorch Distributed, VLDB 2020"},
          &ddp,
          {parameter(&DdpOptions::first_bytes, "first_bytes", 1, kSizeMax, "size at which the first bucket closes"),
           parameter(&DdpOptions::cap_bytes, "cap_bytes", 1, kSizeMax, "size at which every other bucket closes")}),
      policy_entry(
          {.name = "prophet",
           .summary = "blocks sized to be gone before the next burst of gradients, most urgent bytes first",
           .source = "Prophet, ICPP 2021"},
          &prophet,
          {parameter(&ProphetOptions::partition_bytes, "partition_bytes", 1, kSizeMax, "largest partition of a tensor"),
           parameter(&ProphetOptions::credit_bytes, "credit_bytes", 0, kSizeMax,
                     "partitions in flight together after the last burst; 0: tuned"),
           parameter(&ProphetOptions::gap_factor, "gap_factor", 0, 1e6,
                     "a gap above this many mean gaps ends a burst")}),
      policy_entry(
          {.name = "dear",
           .summary = "reduce-scatter under backward, all-gather under forward, fused groups",
           .source = "DeAR, ICDCS 2023",
           .overlap_only = true,
           .needs_scatter_gather = true},
          &dear,
          {parameter(&DearOptions::fusion_bytes, "fusion_bytes", 0, kSizeMax, "largest group of tensors; 0: tuned")}),
      policy_entry(
          {.name = "usbyte",
           .summary = "unequal blocks that fill the time until the next gradient, priorities adjusted by search",
           .source = "US-Byte, TPDS 2024"},
          &usbyte,
          {parameter(&UsbyteOptions::unit_bytes, "unit_bytes", 0, kSizeMax,
                     "smallest part of a tensor that is sent; 0: tuned"),
           parameter(&UsbyteOptions::search, "search", 0, 1, "0: priorities by urgency alone")}),
      policy_entry({.name = "dcredit",
                    .summary = "a credit for every gap between gradients, start-up cost included",
                    .source = "D-Credit, TNSE 2025"},
                   &dcredit,
                   {parameter(&DcreditOptions::unit_bytes, "unit_bytes", 0, kSizeMax,
                              "smallest part of a tensor that is sent; 0: tuned")}),
      policy_entry({.name = "fsdp",
                    .summary = "one operation for what becomes ready together, as FSDP sends a group to the replicas",
                    .source = "PyTorch FSDP, VLDB 2023"},
                   &fsdp),
  };
}

}  // namespace gradcast
