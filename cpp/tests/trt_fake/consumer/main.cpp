#include <iostream>

#include "calib8/trt/builder.hpp"

int main() { std::cout << calib8::trt::version() << "\n"; }
