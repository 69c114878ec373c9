// Requests -> the engine's work structs. Pure functions: no weight is looked up, nothing runs.
//
// A request is checked in two steps: by itself, before its weight is known, and then against the
// weight's shape. Every error is a FieldError.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "awqd/v1/inference.pb.h"
#include "awqd/v1/model_repository.pb.h"
#include "kernels/weight.h"
#include "server/engine/dequantize_work.h"
#include "server/engine/matmul_work.h"

namespace awqd::wire {

// Longest request_id, in bytes.
inline constexpr int64_t kMaxRequestIdBytes = 256;
// Longest weight path, in bytes.
inline constexpr int64_t kMaxWeightPathBytes = 1024;

// What holds whatever weight the request names: source, id, enums, and tensors that agree with
// themselves.
// `cut_bytes`: of the activations' contents, when they are not in the message.
absl::Status CheckRequest(const v1::QuantizedMatmulRequest& request,
                          std::optional<int64_t> cut_bytes = std::nullopt);
absl::Status CheckRequest(const v1::DequantizeRequest& request);

// A name in ModelRepository requests, before it goes anywhere near a file system.
absl::Status CheckName(const std::string& name);

// A product, and how its answer is spelled. work.x stays empty.
template <typename Work>
struct ProductJob {
  Work work;
  int64_t x_bytes = 0;
  std::string x;  // the activations' bytes, unless they are not in the message
  std::vector<int64_t> output_shape;
  int64_t answer_bytes = 0;  // of the answer's contents
  v1::Encoding encoding = v1::RAW;
};
using MatmulJob = ProductJob<engine::MatmulWork>;

// Moves the payload out of a request that passed CheckRequest. RESOURCE_EXHAUSTED when the answer
// is to be sent and would pass `max_send_bytes`. work.weight stays null.
absl::StatusOr<MatmulJob> BuildMatmul(v1::QuantizedMatmulRequest* request,
                                      const WeightShape& weight, int64_t max_send_bytes,
                                      std::optional<int64_t> cut_bytes = std::nullopt,
                                      const DeclaredActivations& declared = {});

// A block of a weight. work.weight stays null.
struct DequantizeJob {
  engine::DequantizeWork work;
  v1::Encoding encoding = v1::RAW;
};

absl::StatusOr<DequantizeJob> BuildDequantize(const v1::DequantizeRequest& request,
                                              const WeightShape& weight);

// RESOURCE_EXHAUSTED, with a hint to DequantizeStream, when the block is to be sent and does not
// fit in one message.
absl::Status CheckFits(const v1::DequantizeRequest& request, const DequantizeJob& job,
                       int64_t max_send_bytes);

// Rows per chunk of a stream, at least 1: about `chunk_bytes` each. RESOURCE_EXHAUSTED when a
// single row passes `max_send_bytes`.
absl::StatusOr<int64_t> RowsPerChunk(const DequantizeJob& job, int64_t chunk_bytes,
                                     int64_t max_send_bytes);

// Bytes of a response beyond its tensor's contents: ids, names, shape.
inline constexpr int64_t kResponseOverheadBytes = 1024;

}  // namespace awqd::wire
