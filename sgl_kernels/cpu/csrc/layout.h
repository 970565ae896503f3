// How a page is laid out for one (layer, head): a row of the table that `sgl_kernels/cpu/tables.py` makes. The binary
// contract itself is described in `sgl_kernels/page_layout.py`.
#pragma once

#include <cstdint>

namespace csa2 {

enum Basis : int64_t { kModel = 0, kFlat = 1, kIdentity = 2, kReduced = 3 };
enum Codes : int64_t { kPlain = 0, kE4M3 = 1, kE2M1 = 2, kInt4 = 3, kInt4A = 4, kLloyd2 = 5 };
enum Order : int64_t { kRowOrder = 0, kLineOrder = 1 };

constexpr int kMaxClasses = 4;
constexpr int kPieceFields = 24;

// Offsets are bytes from the start of the page; -1 where a part does not exist.
struct HeadPiece {
  int64_t basis, order, entries;
  int64_t k_codes, v_codes, k_scales, v_scales, k_mean, v_mean, bias;
  int64_t v_kind;
  int64_t basis_offset;  // of the (D, C) matrix of a reduced head, in floats
  int64_t num_classes;
  int64_t class_kind[kMaxClasses];
  int64_t class_channels[kMaxClasses];
  int64_t reserved[3];
};
static_assert(sizeof(HeadPiece) == kPieceFields * sizeof(int64_t));

// One page of a plan.
struct PageRef {
  int64_t format, offset, length;
};

// Tables indexed by a code byte or a code; filled once.
struct CodeTables {
  float e4m3[256];
  float ue5m3[256];
  float nibble[3][16];  // e2m1, int4, int4a
  float lloyd2[4];
  CodeTables();
};
const CodeTables& code_tables();

inline const float* code_values(int64_t kind) {
  const CodeTables& t = code_tables();
  if (kind == kE4M3) return t.e4m3;
  return kind == kLloyd2 ? t.lloyd2 : t.nibble[kind - kE2M1];
}

inline int code_bits(int64_t kind) { return kind == kE4M3 ? 8 : (kind == kLloyd2 ? 2 : 4); }

}  // namespace csa2
