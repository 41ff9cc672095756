// A transport over MPI, for gradients in the memory of the host. In builds with MPI (CMake target gradcast::mpi).
//
// One thread, "gradcast-mpi", makes every MPI call of the transport and drives its operations on: MPI itself makes progress only
// inside of its calls. Blocks are MPI's non-blocking collectives on a communicator of the transport's own, so nothing else that
// the program sends can be taken for them.
//
// MPI has no way to give a collective up. After an abort the library may still write into the bytes of what was in flight;
// communicator and buffers of such a transport must stay until the process ends, and MPI_Finalize may wait for peers that
// never come: a program that ends because of an error calls MPI_Abort.
//
// Thread safety: any thread, within the contract of gradcast/transport.h.
#pragma once

#include <mpi.h>

#include <memory>
#include <vector>

#include "gradcast/host_buffer.h"
#include "gradcast/transport.h"

namespace gradcast {

// Collective over `communicator`, of which it makes a copy.
// Throws Error{kInvalidUse} where MPI is not initialized, or with less than MPI_THREAD_MULTIPLE; Error{kInvalidOption} for a
// buffer that cuts an element; Error{kCommunication} for what MPI refuses.
std::unique_ptr<Transport> make_mpi_transport(MPI_Comm communicator, std::vector<HostBuffer> buffers);

}  // namespace gradcast
