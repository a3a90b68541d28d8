from longlens.cli import main

main()
