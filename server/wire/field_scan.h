// Sift: what a message will cost to parse, found before anything is parsed.
//
// The generated parser makes an object of dozens of bytes of a field of two, and a number of eight
// bytes of a packed value of one. So a message is looked through first, its payloads unread.
#pragma once

#include <cstdint>
#include <string>

#include "google/protobuf/descriptor.h"
#include "server/wire/field_reader.h"

namespace awqd::wire {

// A message is refused with more fields than this, those of the messages in it among them, and with
// any group, which proto3 does not have. Packed values are fields too, but for those of IntValues,
// FloatValues and InferTensorContents, which are one.
inline constexpr int kMaxFields = 4096;

int64_t SizeOfAll(Pieces pieces);

// Which bytes of a message are its payload, and are left where they are: those of `field` in its
// message field `message`, or, where that is 0, of its own `field`. None: both are 0.
struct PayloadPlace {
  int message = 0;
  int field = 0;
};
// activations.raw of every request for products.
inline constexpr PayloadPlace kActivationsRaw = {3, 3};

struct Sifted {
  // False: the message is refused, or is plainly none of its type.
  bool passes = false;
  // About what the parsed message will hold: its strings, and its packed values as the parser keeps
  // them.
  int64_t parsed_bytes = 0;
  // Where the packed values are that were too many, "activations.shape", and how many bytes they
  // have; empty: something else was wrong.
  std::string crowded_field;
  int64_t crowded_bytes = 0;
};

// `payload`: what the parsed message will not hold, because it is cut out (matmul_wire.h).
Sifted Sift(Pieces pieces, const google::protobuf::Descriptor& type, PayloadPlace payload = {});

}  // namespace awqd::wire
