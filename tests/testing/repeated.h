// Fills repeated fields of messages.
#pragma once

#include "google/protobuf/repeated_field.h"

namespace awqd {

// Sets the field to `count` times `value`.
template <typename T>
void Repeat(int count, T value, google::protobuf::RepeatedField<T>* field) {
  field->Clear();
  field->Reserve(count);
  for (int i = 0; i < count; ++i) field->Add(value);
}

}  // namespace awqd
