module skylark/load

go 1.19
