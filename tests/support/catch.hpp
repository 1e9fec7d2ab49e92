#pragma once
/// Catch2, version 2 (Debian 12) or 3 (Ubuntu 24.04). Tests keep to what both spell alike: TEST_CASE, SECTION, GENERATE,
/// TEMPLATE_TEST_CASE, CAPTURE, Catch::Matchers::WithinAbs, WithinRel, WithinULP. Not Approx, which moved, nor SKIP, which
/// only version 3 has.
#if __has_include(<catch2/catch_all.hpp>)
#include <catch2/catch_all.hpp>
#else
#include <catch2/catch.hpp>
#endif
