// QuantizeKv and DequantizeKv: requests -> the engine's works, results -> answers. Pure functions.
#pragma once

#include <cstdint>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "awqd/v1/inference.pb.h"
#include "server/engine/kv4_work.h"
#include "server/wire/raw_message.h"
#include "server/wire/validation.h"

namespace awqd::wire {

using QuantizeKvJob = Job<engine::Kv4StoreWork>;
using DequantizeKvJob = Job<engine::Kv4LoadWork>;

// Checks what holds for any block: id, encoding, and scales beside zeros.
absl::Status CheckRequest(const v1::QuantizeKvRequest& request);
absl::Status CheckRequest(const v1::DequantizeKvRequest& request);

// Move the payloads out of a request that passed CheckRequest. INVALID_ARGUMENT naming the field;
// RESOURCE_EXHAUSTED when the answer would pass `max_send_bytes`.
absl::StatusOr<QuantizeKvJob> BuildKv(v1::QuantizeKvRequest* request, int64_t max_send_bytes);
absl::StatusOr<DequantizeKvJob> BuildKv(v1::DequantizeKvRequest* request, int64_t max_send_bytes);

// Moves the scales and zeros that follow the codes in the answer's result, if any, into `response`.
void FillScales(Answer* answer, v1::QuantizeKvResponse* response);

}  // namespace awqd::wire
