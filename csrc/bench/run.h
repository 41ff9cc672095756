// gradcast-bench: measures a network, and what each policy makes of it.
//
// Thread safety: any thread, one at a time.
#pragma once

namespace gradcast {

// The whole program without main(). Returns the exit code.
int run_bench(int argc, char** argv);

}  // namespace gradcast
