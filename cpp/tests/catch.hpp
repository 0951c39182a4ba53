// Catch2 version 2, as Debian 12 has it.
#pragma once

#include <catch2/catch.hpp>
