#include "gradcast/types.h"

#include <string>

#include "gradcast/error.h"

namespace gradcast {

std::string_view to_string(Mode mode) {
  switch (mode) {
    case Mode::kOverlap:
      return "overlap";
    case Mode::kHook:
      return "hook";
  }
  GC_CHECK(false && "a Mode outside its enumerators");
}

Op op_from_string(std::string_view name) {
  for (Op op : {Op::kAllReduce, Op::kReduceScatter, Op::kAllGather}) {
    if (name == to_string(op)) return op;
  }
  throw Error(ErrorCode::kInvalidOption,
              "the operation '" + std::string(name) + "' is unknown; use all_reduce, reduce_scatter or all_gather");
}

Mode mode_from_string(std::string_view name) {
  for (Mode mode : {Mode::kOverlap, Mode::kHook}) {
    if (name == to_string(mode)) return mode;
  }
  throw Error(ErrorCode::kInvalidOption, "the mode '" + std::string(name) + "' is unknown; use overlap or hook");
}

}  // namespace gradcast
