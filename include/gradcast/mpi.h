// A transport over MPI, for gradients in host memory. Part of builds with MPI (CMake target gradcast::mpi).
//
// Blocks are MPI's non-blocking collectives on a communicator of the transport's own, so they cannot be mixed up with
// other messages of the program. MPI makes progress only inside its calls: a thread named "gradcast-mpi" makes all of
// the transport's calls and polls while operations are under way.
//
// MPI cannot cancel a collective. After an abort the library may still write into the bytes of operations that were in
// flight, so communicator and buffers of that transport must stay until the process ends. MPI_Finalize may then wait
// for peers that never come: a program that ends because of an error should call MPI_Abort.
//
// Thread safety: any thread, within the contract of gradcast/transport.h.
#pragma once

#include <mpi.h>

#include <memory>
#include <vector>

#include "gradcast/transport.h"

namespace gradcast {

// Collective over `communicator`, which it copies. Throws Error{kInvalidUse} if MPI is not initialized with
// MPI_THREAD_MULTIPLE, Error{kInvalidOption} for a buffer that cuts an element, Error{kCommunication} for any other
// failure of MPI.
std::unique_ptr<Transport> make_mpi_transport(MPI_Comm communicator, std::vector<HostBuffer> buffers);

}  // namespace gradcast
