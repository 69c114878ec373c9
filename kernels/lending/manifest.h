// The protocol of a lender of weights and a borrower on the same machine: one request and one answer
// over a UNIX socket, and the manifest, which says where each weight is in the lent memory.
//
// The borrower connects to the path of --lend and sends a LeaseRequest, then the model's name and an
// authorization ("Bearer TOKEN", or nothing). The answer is a LeaseAnswer, then the text of an error
// or nothing; after success it carries two descriptors: the manifest, a sealed memfd, and the memory
// of the weights. The lease lasts until the borrower closes the connection; what is mapped stays.
//
// Both begin with numbers that every version has, so that either side can name both versions.
// Numbers are those of the machine.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "kernels/lending/arena.h"
#include "kernels/weight.h"

namespace awqd::lending {

inline constexpr uint32_t kMagic = 0x6c717761;  // "awql"
inline constexpr uint32_t kProtocol = 1;
inline constexpr uint32_t kMaxModelBytes = 128;
inline constexpr uint32_t kMaxTokenBytes = 8 << 10;
inline constexpr uint32_t kMaxTextBytes = 4 << 10;
// A manifest has room for 262144 weights with long paths.
inline constexpr int64_t kMaxManifestBytes = int64_t{256} << 20;

struct LeaseRequest {
  uint32_t magic = kMagic;
  uint32_t protocol = kProtocol;
  char device[32] = {};  // "cpu", or the PCI bus id of a GPU: "0000:1b:00.0"
  uint32_t model_bytes = 0;
  uint32_t token_bytes = 0;
};

struct LeaseAnswer {
  uint32_t magic = kMagic;
  uint32_t protocol = kProtocol;
  uint32_t code = 0;  // of google.rpc.Code
  uint32_t text_bytes = 0;
  int64_t manifest_bytes = 0;
};

// The device as a request names it: its PCI bus id, "cpu" without one.
std::string NameForLease(const DeviceInfo& device);

// A weight in the lent memory. What follows from these is not said: a borrower computes it, and
// compares the bytes.
struct LentWeight {
  std::string path;
  std::string format;
  std::string layout;
  WeightShape shape;
  bool order = false, factor = false, bias = false;  // whether it has those parts
  Hadamard hadamard;
  DeclaredActivations activations;
  int64_t offset = 0;  // in the memory, a multiple of Sections::kAlign
  int64_t bytes = 0;
  uint64_t digest = 0;  // DigestOfWeight of those bytes
  // The linear that it is, or is a part of: its K and N, and where in it the part begins.
  int64_t whole_k = 0, whole_n = 0;
  int64_t row_begin = 0, col_begin = 0;
};

struct Manifest {
  std::string awqd_version;   // "0.1.0"
  uint64_t layouts = 0;       // LayoutsDigest of the lender
  int64_t model_version = 0;  // counts the loads under the model's name
  int64_t memory_bytes = 0;   // all of it is mapped
  std::vector<LentWeight> weights;
};

// `weight`: of `arena`, and a whole linear.
LentWeight Describe(std::string path, const DeviceWeight& weight, const WeightArena& arena);

std::string Print(const Manifest& manifest);

// Reads a manifest and checks all that no device need be known for: sizes, schemes, that each weight
// lies in the memory and none in another's. FAILED_PRECONDITION names both versions where the
// manifest is of another version than `awqd_version`, or was made with other layouts; INVALID_ARGUMENT
// names the weight and the field.
absl::StatusOr<Manifest> Parse(absl::string_view text, absl::string_view awqd_version);

// A digest of what the layouts make of sample weights of every kind of code: another one means that
// a layout changed, or the order of a weight's parts.
uint64_t LayoutsDigest();

}  // namespace awqd::lending
