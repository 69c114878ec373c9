// The calls of the inference protocol about shared memory.
#pragma once

#include <string>

#include "absl/status/status.h"
#include "inference/grpc_service.pb.h"
#include "server/services/env.h"
#include "server/services/oip/regions.h"

namespace awqd::services::oip {

// Each of one owner's regions. UNIMPLEMENTED where shared memory is off; errors of Regions, and of
// SharedMemory::Open for a range that cannot be opened now.
absl::Status RegisterRegion(const Env& env, Regions* regions, const std::string& owner,
                            const inference::SystemSharedMemoryRegisterRequest& request);
absl::Status UnregisterRegion(const Env& env, Regions* regions, const std::string& owner,
                              const inference::SystemSharedMemoryUnregisterRequest& request);
absl::Status ListRegions(const Env& env, const Regions& regions, const std::string& owner,
                         const inference::SystemSharedMemoryStatusRequest& request,
                         inference::SystemSharedMemoryStatusResponse* response);

}  // namespace awqd::services::oip
