#include "bench/run.h"

int main(int argc, char** argv) {
  return gradcast::run_bench(argc, argv);
}
