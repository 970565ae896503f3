#include "layout.h"

#include <cmath>

namespace csa2 {

CodeTables::CodeTables() {
  for (int i = 0; i < 256; ++i) {
    const int exponent = (i >> 3) & 15, mantissa = i & 7;
    float x = exponent ? std::ldexp(8.0f + mantissa, exponent - 10) : std::ldexp(static_cast<float>(mantissa), -9);
    if ((i & 0x7f) == 0x7f) x = NAN;
    e4m3[i] = i & 0x80 ? -x : x;
    ue5m3[i] = std::ldexp(8.0f + (i & 7), (i >> 3) - 18);
  }
  const float magnitude[8] = {0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f};
  for (int i = 0; i < 16; ++i) {
    nibble[0][i] = i & 8 ? -magnitude[i & 7] : magnitude[i & 7];
    nibble[1][i] = static_cast<float>(i) - 8.0f;
    nibble[2][i] = static_cast<float>(i) - 7.5f;
  }
  const float levels[4] = {-1.510f, -0.4528f, 0.4528f, 1.510f};
  for (int i = 0; i < 16; ++i) lloyd2[i] = levels[i % 4];
}

const CodeTables& code_tables() {
  static const CodeTables tables;
  return tables;
}

}  // namespace csa2
