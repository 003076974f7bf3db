from stella.learn.home import Home


def write_page(home: Home) -> None:
    pass
