// QuantizeKv and DequantizeKv: requests -> the engine's works, results -> answers. Pure functions.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "awqd/v1/inference.pb.h"
#include "server/engine/kv4_work.h"
#include "server/wire/raw_message.h"

namespace awqd::wire {

// A work without its payloads, their bytes, and how the answer is spelled.
struct QuantizeKvJob {
  engine::Kv4StoreWork work;
  std::string x, scale, zero;
  v1::Encoding encoding = v1::RAW;
};
struct DequantizeKvJob {
  engine::Kv4LoadWork work;
  std::string codes, scale, zero;
  v1::Encoding encoding = v1::RAW;
};

// Move the payloads out of the request. INVALID_ARGUMENT naming the field; RESOURCE_EXHAUSTED when
// the answer would pass `max_send_bytes`.
absl::StatusOr<QuantizeKvJob> BuildKv(v1::QuantizeKvRequest* request, int64_t max_send_bytes);
absl::StatusOr<DequantizeKvJob> BuildKv(v1::DequantizeKvRequest* request, int64_t max_send_bytes);

// Bytes of the answer's tensors in a message.
int64_t AnswerBytes(const QuantizeKvJob& job);
int64_t AnswerBytes(const DequantizeKvJob& job);

// The answer but for its first tensor, which `first` describes.
v1::QuantizeKvResponse ResponseOf(const QuantizeKvJob& job, const engine::Payload& result,
                                  std::vector<int64_t>* shape, Answer* first);
v1::DequantizeKvResponse ResponseOf(const DequantizeKvJob& job, const engine::Payload& result,
                                    std::vector<int64_t>* shape, Answer* first);

}  // namespace awqd::wire
